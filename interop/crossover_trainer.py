"""TRL's GRPOTrainer, with the crossover reward of every token of a completion.

    python -c "from interop.crossover_trainer import CrossoverTrainer; help(CrossoverTrainer)"

Exact credit minimises the divergence of the policy from the mixture m of the reward's two models,
over the whole vocabulary. With token credit, the reward of a token is its evidence minus the KL to
the start; its advantage is relative to the group's mean at the same position. TRL's advantages of
further reward functions are added.
Shapes: B completions of a process, at most C tokens each; R completions of all processes; G of one
prompt; F reward functions.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast, is_peft_model
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import (
    _ForwardRedirection,
    disable_gradient_checkpointing,
    unwrap_model_for_generation,
)

from common.process import require
from grpo.policy_loss import token_advantages
from interop.crossover_reward import REWARD_FILE, CausalModel, CrossoverReward
from interop.exact_credit import check_logits, exact_terms
from losses import check_choice

# Plain sampling, the only one that the formulas score: allowed values of GRPOConfig's fields.
PLAIN_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, None),
    "min_p": (None,),
    "repetition_penalty": (1.0,),
    "generation_kwargs": (None, {}),
    "vllm_structured_outputs_regex": (None,),
}
# Nats per token by which one model's log-probabilities may differ between two precisions.
MAX_START_DIFFERENCE = 0.1


class CrossoverTrainer(GRPOTrainer):
    """GRPO toward the mixture m of a crossover reward, with the credits of train_grpo.py.

    credit 'token': the reward of a token is log(m/q) - log(pi/q). 'exact': its expectation over the
    vocabulary, which is minus the divergence of the policy from m, at the position of each token;
    kl 'reverse' is KL(pi || m), 'forward' KL(m || pi). 'auto': exact if the reward has a natural
    model, else token. The loss of exact credit is a mean over tokens, in nats; the rewards of token
    credit are divided by a standard deviation (scale_rewards of GRPOConfig).

    reward_funcs and all further arguments are GRPOTrainer's. The weights and processing classes of
    rewards are those of reward_funcs. The advantage of a token is that of the crossover reward plus
    TRL's advantage of its completion, times the largest weight if TRL's scaling cancels the size of
    the weights: a function of weight 2 counts twice as much as the crossover reward.

    With refresh_every=N, the reward's head is fitted to the policy's own text at the first
    generation that is N optimizer steps or more after the last fit; checkpoints hold the head.

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
        *,
        credit: str = "auto",
        kl: str = "reverse",
        **kwargs: Any,
    ) -> None:
        check_choice("credit", credit, ("auto", "exact", "token"))
        check_choice("kl", kl, ("reverse", "forward"))
        require(
            reward.has_distributions or credit != "exact",
            'credit="exact" needs a reward with a natural model: '
            'pass natural= to the reward, or use credit="token"',
        )
        self.is_exact = reward.has_distributions and credit != "token"
        self.kl = kl
        args = copy.copy(args or GRPOConfig("trl_model"))
        for field, allowed in PLAIN_SAMPLING.items():
            value = getattr(args, field)
            require(
                value in allowed,
                f"{field}={value}: must be {allowed[0]}, the sampling that the formulas score",
            )
        args.disable_dropout = True
        # TRL needs a function. Alone, the crossover reward is one whose advantages are replaced.
        functions = reward_funcs or [self.crossover_reward]
        super().__init__(model=model, reward_funcs=functions, args=args, **kwargs)
        require(
            not self._is_vlm,
            "the model has a processor of images: "
            "pass its tokenizer as processing_class, because the reward reads only text",
        )
        name = reward.__name__
        self.has_functions = self.reward_funcs != [self.crossover_reward]
        if reward_funcs:
            require(
                name not in self.reward_func_names,
                f"{name} is the trainer's own reward: rename the reward function",
            )
        elif self.has_functions:  # an environment of TRL has added its own reward
            self.reward_weights[0] = 0
        self.reward = reward
        reward.max_completion_length = args.max_completion_length
        reward.figures["step"] = 0  # optimizer step of the last fit
        self._share_fitted()
        policy = self.accelerator.unwrap_model(self.model)
        generator = reward.head.generator
        if is_peft_model(policy):
            is_same = generator.model in (policy, policy.get_base_model())
            # A model with a name was loaded twice, by the reward and by TRL: keep one.
            if is_same or model == reward.generator_name:
                generator.model = policy  # read with its adapters off
        else:
            require(
                policy is not generator.model,
                "the reward holds the model that is trained: pass its folder, or train with LoRA",
            )
        self._token_weights: Tensor | None = None  # only while the loss of exact credit is computed
        if self.is_exact:
            require(
                not self.aux_loss_enabled,
                'credit="exact" has no loss of routers: '
                'set router_aux_loss_coef=0, or use credit="token"',
            )
            self.policy = CausalModel(policy, reward.head.natural.config.vocab_size)
            for causal_model in (self.policy, reward.head.natural, generator):
                check_logits(causal_model)

    def _share_fitted(self) -> None:
        """Give all processes what the first one has fitted; each has fitted for itself."""
        for tensor in self.reward.head.fitted().values():
            tensor.copy_(broadcast(tensor))

    def _refresh_reward(self) -> None:
        """Fit the reward's head to the policy's text if the last fit is old enough; log R2."""
        step = self.state.global_step
        every = self.reward.refresh_every
        if not every or step - self.reward.figures["step"] < every:
            return
        with unwrap_model_for_generation(
            self.model_wrapped,
            self.accelerator,
            self.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
        ) as policy:
            figures = self.reward.refresh(policy, step, self.args.seed)
        self._share_fitted()
        self._metrics["train"]["crossover/refresh_r2"].append(figures["r2"])

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save a head that changes beside the optimizer."""
        super()._save_optimizer_and_scheduler(output_dir)
        if self.reward.refresh_every and self.args.should_save:
            self.reward.save(Path(output_dir, REWARD_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load a head that changes beside the optimizer."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.reward.refresh_every and checkpoint is not None:
            self.reward.load(Path(checkpoint, REWARD_FILE))

    def crossover_reward(self, completion_ids: list[list[int]], **_: Any) -> list[float]:
        """Return E[K] / T of each completion (B), or 0; keep what the reward has read."""
        if not self._is_read:
            return [0.0] * len(completion_ids)
        shares, self._evidence, self._start = self.reward.score(self._prompt_ids, completion_ids)
        return shares

    def _generate(self, prompts: list[Any]) -> Any:
        """Return what TRL generates; keep the prompts' token ids."""
        generated = super()._generate(prompts)
        self._prompt_ids: list[list[int]] = generated[0]
        return generated

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: list[list[int]]
    ) -> Tensor:
        """Return the rewards (R, F) of TRL's functions; log the crossover reward beside them.

        Exact credit needs no E[K] / T, which takes another pass of both models: measure it once per
        log. TRL leaves NaN out of its means.
        """
        name = self.reward.__name__
        can_skip = self.is_exact and self.model.training and not self.log_completions
        self._is_read = not can_skip or not self._metrics["train"].get(f"rewards/{name}/mean")
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.crossover_reward in self.reward_funcs:
            if not self._is_read:
                return torch.full_like(rewards, torch.nan)
        elif self._is_read:
            shares = self.crossover_reward(completion_ids_list)
            self._log_metric(f"rewards/{name}/mean", sum(shares) / len(shares))
            self._log_completion_extra(name, shares)
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch with the advantages (B, C) of sampled tokens."""
        if self.model.training:
            self._refresh_reward()
        batch = super()._generate_and_score_completions(inputs)
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)  # (B, C)
        task_advantages = batch["advantages"][:, None] * mask  # (B, C)
        rotary = getattr(self.model.config.get_text_config(), "rope_parameters", None)
        require(
            rotary is not None or bool(batch["prompt_mask"].all()),
            "the model has no rotary positions: use prompts of equal length",
        )
        if self.is_exact:
            batch["advantages"] = torch.zeros_like(task_advantages)
        else:
            batch["advantages"] = self._token_advantages(batch, mask)
        if self.has_functions:
            batch["advantages"] = batch["advantages"] + self._task_weight() * task_advantages
        return batch

    def _token_advantages(self, batch: dict[str, Any], mask: Tensor) -> Tensor:
        """Return the advantages (B, C) of token credit."""
        is_training = self.model.training
        B, C = mask.shape
        evidence, start = self._evidence_and_start(batch)
        kl = self._policy_log_probs(batch) - start
        self._log_and_check({"evidence": evidence, "kl_start": kl}, mask)
        # Groups may be spread over the processes: compute advantages of all R completions.
        rewards = self._gathered((evidence - kl) * mask)  # (R, C of the longest)
        group_size = self.num_generations if is_training else self.num_generations_eval
        advantages = token_advantages(rewards, self._gathered(mask), group_size, self.scale_rewards)
        first = self.accelerator.process_index * B
        return advantages[first : first + B, :C]

    def _log_and_check(self, figures: dict[str, Tensor], mask: Tensor) -> None:
        """Log the means of figures (B, C) over the mask, and check that the policy starts as q."""
        num_tokens = mask.sum().clamp(min=1)
        difference = (figures["kl_start"] * mask).abs().sum() / num_tokens
        is_start = self.model.training and self.state.global_step == 0
        require(
            not is_start or bool(difference <= MAX_START_DIFFERENCE),
            f"the policy differs from the reward's generator by {difference:.2f} nats per token "
            "at its start: make the reward from the model that is trained",
        )
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, values in figures.items():
            sums = torch.stack(((values * mask).sum(), mask.sum()))
            total, num_tokens = self.accelerator.reduce(sums)
            metrics[f"crossover/{name}"].append((total / num_tokens.clamp(min=1)).item())

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """Return TRL's loss () of sampled tokens, plus the divergence from m with exact credit.

        The divergence is a mean over the tokens of the optimizer step, as with loss_type 'dapo'.
        """
        if not self.is_exact:
            return super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)  # (B, C)
        num_tokens = inputs["num_items_in_batch"].clamp(min=1) / self.accelerator.num_processes
        if self.model.training:
            steps = self.current_gradient_accumulation_steps / self.args.steps_per_generation
            num_tokens = num_tokens * steps
        self._token_weights = mask / num_tokens
        loss = super()._compute_loss(model, inputs)
        self._token_weights = None
        figures = ("divergence", "evidence", "kl_start")
        self._log_and_check({name: self._terms[name] for name in figures}, mask)
        return loss + self._terms["loss"]

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Tensor, attention_mask: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any, Any]:
        """Return log-probabilities and entropies (B, C), as TRL does.

        The loss of exact credit gets them from the same pass of the policy as the divergence.
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
            self.kl,
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

    def _gathered(self, values: Tensor) -> Tensor:
        """Return the values (B, C) of all processes as (R, C of the longest), padded with 0."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(values, dim=1))

    def _evidence_and_start(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the completions' evidence and log-probabilities under the start, both (B, C).

        The crossover reward has read the sequences without padding.
        """
        C = batch["completion_ids"].size(1)
        device = batch["completion_ids"].device
        lengths = torch.tensor([len(ids) for ids in self._prompt_ids])
        # (B, C): minus one, because the first token of a sequence is not scored.
        places = lengths[:, None] - 1 + torch.arange(C)
        places = places.clamp(max=self._start.size(1) - 1).to(device)
        evidence = self._evidence[:, 1:].to(device).gather(1, places)
        start = self._start.to(device).gather(1, places)
        return evidence, start

    @torch.no_grad()
    def _policy_log_probs(self, batch: dict[str, Any]) -> Tensor:
        """Return the completions' log-probabilities (B, C) under the policy that sampled them."""
        if batch.get("old_per_token_logps") is not None:
            return batch["old_per_token_logps"]
        ids = torch.cat((batch["prompt_ids"], batch["completion_ids"]), 1)
        mask = torch.cat((batch["prompt_mask"], batch["completion_mask"]), 1)
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            log_probs, *_ = self._get_per_token_logps_and_entropies(
                self.model,
                ids,
                mask,
                batch["completion_ids"].size(1),
                self.args.per_device_train_batch_size,
            )
        return log_probs
