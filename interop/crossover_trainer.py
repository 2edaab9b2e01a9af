"""TRL's GRPOTrainer with an advantage for every token of a completion.

    python -c "from interop.crossover_trainer import CrossoverTrainer; help(CrossoverTrainer)"

The reward of a token is its evidence minus the KL to the start; its advantage is relative to the
group's mean at the same position. TRL's advantages of further reward functions are added.
Shapes: B completions of a process, at most C tokens each; R completions of all processes; G of one
prompt; F reward functions.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast, is_peft_model
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing, unwrap_model_for_generation

from common.process import require
from grpo.policy_loss import token_advantages
from interop.crossover_reward import REWARD_FILE, CrossoverReward

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
    """GRPO with token credit: the reward of a token is log(m/q) - log(pi/q), as in train_grpo.py.

    reward_funcs and all further arguments are GRPOTrainer's. The weights and processing classes of
    rewards are those of reward_funcs. The advantage of a token is that of the crossover reward plus
    TRL's advantage of its completion, times the largest weight if TRL's scaling cancels the size of
    the weights: a function of weight 2 counts twice as much as the crossover reward.

    With refresh_every=N, the reward's head is fitted to the policy's own text at the first
    generation that is N optimizer steps or more after the last fit; checkpoints hold the head.

    The policy starts as the reward's generator q. With LoRA, q is the policy with its adapters off
    if reward and trainer have the same loaded model, or both have the same name; else the reward
    keeps its own copy. Dropout is off, as it is during sampling.

    Raise UserError if the sampling is not plain, if the policy does not start as the reward's
    generator, if the trainer has a processor of images, or if prompts differ in length and the
    model has no rotary positions (TRL would read completions at positions different from those of
    the sampling).
    """

    def __init__(
        self,
        model: Any,
        reward: CrossoverReward,
        args: GRPOConfig | None = None,
        reward_funcs: Any = None,
        **kwargs: Any,
    ) -> None:
        args = copy.copy(args or GRPOConfig("trl_model"))
        for field, allowed in PLAIN_SAMPLING.items():
            value = getattr(args, field)
            rule = f"must be {allowed[0]}, the sampling that the formulas score"
            require(value in allowed, f"{field}={value}: {rule}")
        args.disable_dropout = True
        # TRL needs a function. Alone, the crossover reward is one whose advantages are replaced.
        functions = reward_funcs or [self.crossover_reward]
        super().__init__(model=model, reward_funcs=functions, args=args, **kwargs)
        text_only = "pass its tokenizer as processing_class, because the reward reads only text"
        require(not self._is_vlm, f"the model has a processor of images: {text_only}")
        name = reward.__name__
        self.has_functions = self.reward_funcs != [self.crossover_reward]
        if reward_funcs:
            is_other = name not in self.reward_func_names
            require(is_other, f"{name} is the trainer's own reward: rename the reward function")
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
            way_out = "pass its folder, or train with LoRA"
            is_other = policy is not generator.model
            require(is_other, f"the reward holds the model that is trained: {way_out}")

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
        """Return E[K] / T of each completion (B); keep what the reward has read."""
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
        """Return the rewards (R, F) of TRL's functions; log the crossover reward beside them."""
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.crossover_reward not in self.reward_funcs:
            shares = self.crossover_reward(completion_ids_list)
            name = self.reward.__name__
            self._log_metric(f"rewards/{name}/mean", sum(shares) / len(shares))
            self._log_completion_extra(name, shares)
        return rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch with token advantages (B, C)."""
        if self.model.training:
            self._refresh_reward()
        batch = super()._generate_and_score_completions(inputs)
        is_training = self.model.training
        B, C = batch["completion_ids"].shape
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)  # (B, C)
        task_advantages = batch["advantages"][:, None] * mask  # (B, C)
        evidence, start = self._evidence_and_start(batch)
        kl = (self._policy_log_probs(batch) - start) * mask
        is_start = is_training and self.state.global_step == 0
        difference = kl.abs().sum() / mask.sum().clamp(min=1)
        require(
            not is_start or bool(difference <= MAX_START_DIFFERENCE),
            f"the policy differs from the reward's generator by {difference:.2f} nats per token "
            "at its start: make the reward from the model that is trained",
        )

        # Groups may be spread over the processes: compute advantages of all R completions.
        evidence = self._gathered(evidence * mask)  # (R, C of the longest)
        kl = self._gathered(kl)
        mask = self._gathered(mask)
        group_size = self.num_generations if is_training else self.num_generations_eval
        advantages = token_advantages(evidence - kl, mask, group_size, self.scale_rewards)
        metrics = self._metrics["train" if is_training else "eval"]
        num_tokens = mask.sum().clamp(min=1)
        metrics["crossover/evidence"].append((evidence.sum() / num_tokens).item())
        metrics["crossover/kl_start"].append((kl.sum() / num_tokens).item())
        first = self.accelerator.process_index * B
        batch["advantages"] = advantages[first : first + B, :C]
        if self.has_functions:
            batch["advantages"] = batch["advantages"] + self._task_weight() * task_advantages
        return batch

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
        rotary = getattr(self.model.config.get_text_config(), "rope_parameters", None)
        require(
            rotary is not None or bool(batch["prompt_mask"].all()),
            "the model has no rotary positions: use prompts of equal length",
        )
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
