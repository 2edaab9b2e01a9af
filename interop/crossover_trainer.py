"""TRL's GRPOTrainer, with the crossover reward at every token of a completion.

    python -m examples.trl_task

It minimises the divergence of the policy from the mixture m of the reward's two models, over the
whole vocabulary. TRL's loss of further reward functions is added.
Shapes: B completions of a process, at most C tokens each; R completions of all processes; F reward
functions.
"""

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate.utils import broadcast, is_peft_model
from datasets import Dataset
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import _ForwardRedirection

from common.device import without_cudnn_attention
from common.process import require, warn
from interop.crossover_reward import CrossoverReward
from interop.exact_credit import check_logits, exact_terms
from lm.causal import CausalModel, refuse_adapter

# Plain sampling, the only one that the formulas score: values of GRPOConfig's fields. top_k=None
# is another: with it transformers samples from the 50 likeliest tokens.
PLAIN_SAMPLING = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "vllm_structured_outputs_regex": None,
}
# Nats per token by which one model's log-probabilities may differ between two precisions.
MAX_START_DIFFERENCE = 0.1
FIGURES = ("divergence", "evidence", "kl_start", "natural")  # of exact_terms: means over tokens


def no_task(completions: list[Any], **_: Any) -> list[float]:
    """Return rewards of 0. TRL needs a function, also where the crossover reward is alone."""
    return [0.0] * len(completions)


class CrossoverTrainer(GRPOTrainer):
    """GRPO toward the mixture m of a crossover reward of two models, with exact credit.

    The loss is KL(pi || m) at the position of each token, over the vocabulary: a mean over tokens,
    in nats.

    reward_funcs and all further arguments are GRPOTrainer's; processing_class None is the reward's
    tokenizer. The weights and processing classes of rewards are those of reward_funcs. TRL's
    advantage of a completion is multiplied by the largest weight if TRL's scaling cancels the size
    of the weights: a function of weight 2 counts twice as much as the crossover reward.

    The policy starts as the reward's generator q. With LoRA, q is the policy with its adapters off
    if reward and trainer have the same loaded model, or both have the same name; else the reward
    keeps its own copy. Dropout is off, as it is during sampling.

    Raise UserError if exact credit does not fit the reward or a model, if the sampling is not
    plain, if the policy does not start as the reward's generator, if the trainer has a processor of
    images, or if prompts differ in length and the model has no rotary positions (TRL would read
    completions at positions different from those of the sampling).
    """

    def __init__(
        self,
        model: Any,
        reward: CrossoverReward,
        args: GRPOConfig | None = None,
        reward_funcs: Any = None,
        **kwargs: Any,
    ) -> None:
        refuse_adapter(model)
        args = copy.copy(args or GRPOConfig("trl_model"))
        args.generation_kwargs = args.generation_kwargs or None  # {} sets nothing
        for field, plain in PLAIN_SAMPLING.items():
            value = getattr(args, field)
            require(
                value == plain,
                f"{field}={value}: must be {plain}, the sampling that the formulas score",
            )
        args.disable_dropout = True
        if args.tf32 is False:
            torch.set_float32_matmul_precision("highest")  # the reward may have allowed TF32
        if not reward_funcs and kwargs.get("environment_factory") is None:
            weights = args.reward_weights
            require(
                weights is None,
                f"reward_weights={weights}: there are no reward_funcs to weigh, and the crossover "
                "reward counts 1: leave reward_weights out",
            )
            reward_funcs = [no_task]
        if kwargs.get("processing_class") is None:
            kwargs["processing_class"] = reward.tokenizer
        super().__init__(model=model, reward_funcs=reward_funcs, args=args, **kwargs)
        require(
            not self._is_vlm,
            "the model has a processor of images: "
            "pass its tokenizer as processing_class, because the reward reads only text",
        )
        require(
            self._tokenizer.eos_token is not None,
            "the tokenizer has no eos_token: set one, or make the reward from names of models and "
            "leave processing_class out",
        )
        self.has_functions = self.reward_funcs != [no_task]
        self.reward = reward
        head: Any = reward.head
        # Each process has fitted for itself: all take what the first one has fitted.
        head.mixture.data.copy_(broadcast(head.mixture.data))
        policy = self.accelerator.unwrap_model(self.model)
        for adapter in getattr(policy, "peft_config", {}).values():
            require(
                not adapter.is_prompt_learning,
                f"{type(adapter).__name__}: exact credit does not see its virtual tokens: use LoRA",
            )
        generator = head.generator
        held = {head.natural.model}
        # A model with a name was loaded twice, by the reward and by TRL: keep one.
        if is_peft_model(policy) and reward.given_generator in (model, policy.get_base_model()):
            generator.model = policy  # read with its adapters off
        else:
            held.add(generator.model)
        require(
            held.isdisjoint(policy.modules()),
            "the reward holds the model that is trained: pass its folder, or train with LoRA",
        )
        require(reward.is_fitted, "the reward has no weight yet: call its fit(), or pass weight=")
        self._token_weights: Tensor | None = None  # only while the loss is computed
        self._sums: dict[str, Tensor] = {}  # of FIGURES and of tokens since the last log, by mode
        for dataset in (self.train_dataset, self.eval_dataset):
            if isinstance(dataset, Dataset):  # streams and several datasets are checked when read
                self._check_prompts(dataset)
        require(
            not self.aux_loss_enabled,
            "the model has a loss of routers, which would be left out: set router_aux_loss_coef=0",
        )
        self.policy = CausalModel(policy, head.natural.vocab_size)
        for causal_model in (self.policy, head.natural, generator):
            check_logits(causal_model)

    def _check_prompts(self, examples: Iterable[Mapping[str, Any]]) -> None:
        """Raise UserError unless each example has a prompt, or gets one from an environment."""
        if self.environment_factories is not None:
            return
        start = self._tokenizer(text="")["input_ids"]
        for example in examples:
            columns = ", ".join(example)
            require("prompt" in example, f"the data have no column prompt: they have {columns}")
            has_tokens = bool(example["prompt"] or start)
            require(has_tokens, "the data have an empty prompt: leave it out")

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss () of a batch, after its backward pass."""
        with without_cudnn_attention():
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
        """Return the loss () of a batch, without logits and labels."""
        with without_cudnn_attention():
            return super().prediction_step(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch with the advantages (B, C) of sampled tokens."""
        self._check_prompts(inputs)
        batch = super()._generate_and_score_completions(inputs)
        if batch["num_items_in_batch"] == 0:
            warn(
                "no token of the batch counts, so it changes nothing and has no figures: with "
                "mask_truncated_completions=True, raise max_completion_length"
            )
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)  # (B, C)
        batch["advantages"] = self._task_weight() * batch["advantages"][:, None] * mask  # (B, C)
        rotary = getattr(self.model.config.get_text_config(), "rope_parameters", None)
        require(
            rotary is not None or bool(batch["prompt_mask"].all()),
            "the model has no rotary positions: use prompts of equal length",
        )
        return batch

    def _log_and_check(self, num_tokens: Tensor) -> None:
        """Log means of terms over the tokens that count, and check that the policy starts as q."""
        difference = self._terms["kl_start"].abs().sum() / num_tokens.clamp(min=1)
        is_start = self.model.training and self.state.global_step == 0
        require(
            not is_start or bool(difference <= MAX_START_DIFFERENCE),
            f"the policy differs from the reward's generator by {difference:.2f} nats per token "
            "at its start: make the reward from the model that is trained",
        )
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        sums = torch.stack([*(self._terms[name].sum() for name in FIGURES), num_tokens])
        sums = self.accelerator.reduce(sums)
        if sums[-1] == 0:
            return
        if "crossover/divergence" in metrics:  # since the last log
            sums += self._sums[mode]
        self._sums[mode] = sums
        for name, mean in zip(FIGURES, sums / sums[-1], strict=False):
            metrics[f"crossover/{name}"] = [mean.item()]

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return TRL's loss () of sampled tokens, plus the divergence from m.

        The divergence is a mean over the tokens of the optimizer step, as with loss_type 'dapo'.
        """
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # (B, C)
        num_tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:
            steps = self.current_gradient_accumulation_steps / self.args.steps_per_generation
            num_tokens = num_tokens * steps
        self._token_weights = mask / num_tokens
        loss = super()._compute_loss(model, inputs)
        self._token_weights = None
        self._log_and_check(mask.sum())
        return loss + self._terms["loss"]

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any, Any]:
        """Return log-probabilities and entropies (B, C), as TRL does; the third result is unused.

        While the loss is computed, the same pass of the policy gives the divergence.
        """
        if self._token_weights is None:
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, *args, **kwargs
            )
        exact = partial(
            exact_terms,
            self.policy,
            self.reward.head,
            input_ids,
            attention_mask,
            self._token_weights,
            needs_samples=self.has_functions or self.beta != 0 or self._entropy_bonus_enabled,
        )
        # DDP and FSDP act on the forward method of the model that they wrap: compute all in it.
        with self.accelerator.autocast():
            self._terms = _ForwardRedirection()(model, self.policy.model, exact)
        return self._terms["log_probs"], self._terms["entropy"], None

    def _task_weight(self) -> float:
        """Return the factor of TRL's advantages: 1, or the largest absolute weight.

        When TRL divides by a standard deviation, a factor that all weights share cancels. It always
        divides with normalize_then_sum.
        """
        is_sum = self.multi_objective_aggregation == "sum_then_normalize"
        if is_sum and self.scale_rewards == "none":
            return 1.0
        return self.reward_weights.abs().max().item()
