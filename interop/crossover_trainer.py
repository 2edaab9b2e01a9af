"""TRL's GRPOTrainer with an advantage for every token of a completion.

    python -c "from interop.crossover_trainer import CrossoverTrainer; help(CrossoverTrainer)"

The reward of a token is its evidence minus the KL to the start; its advantage is relative to the
group's mean at the same position.
Shapes: B completions of a process, at most C tokens each; R completions of all processes; G of one
prompt.
"""

from typing import Any

import torch
from accelerate.utils import broadcast, is_peft_model
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from common.process import require
from grpo.policy_loss import token_advantages
from interop.crossover_reward import CrossoverReward

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

    The policy starts as the reward's generator q. With LoRA, pass reward and trainer the same
    loaded model: q is this model with its adapters off. Dropout is off, as it is during sampling.

    Raise UserError if the sampling is not plain, if the policy does not start as the reward's
    generator, or if prompts differ in length and the model has no rotary positions (TRL would read
    completions at positions different from those of the sampling).
    """

    def __init__(
        self, model: Any, reward: CrossoverReward, args: GRPOConfig | None = None, **kwargs: Any
    ) -> None:
        args = args or GRPOConfig("trl_model")
        for name, allowed in PLAIN_SAMPLING.items():
            value = getattr(args, name)
            rule = f"must be {allowed[0]}, the sampling that the formulas score"
            require(value in allowed, f"{name}={value}: {rule}")
        args.disable_dropout = True
        super().__init__(model=model, reward_funcs=reward, args=args, **kwargs)
        self.reward = reward
        reward.max_completion_length = args.max_completion_length
        reward.chat_template_kwargs = args.chat_template_kwargs or {}
        # Every process has fitted the weight for itself.
        reward.head.mixture.data = broadcast(reward.head.mixture.data)
        policy = self.accelerator.unwrap_model(self.model)
        generator = reward.head.generator
        if is_peft_model(policy):
            is_same = policy.get_base_model() is generator.model
            require(is_same, "with LoRA, pass the same loaded model to reward and trainer")
            generator.model = policy  # read with its adapters off
        else:
            way_out = "pass its folder, or train with LoRA"
            is_other = policy is not generator.model
            require(is_other, f"the reward holds the model that is trained: {way_out}")

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Return TRL's batch with token advantages (B, C)."""
        batch = super()._generate_and_score_completions(inputs)
        is_training = self.model.training
        B, C = batch["completion_ids"].shape
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)  # (B, C)
        natural, start = self._frozen_log_probs(batch)
        kl = (self._policy_log_probs(batch) - start) * mask
        is_start = is_training and self.state.global_step == 0
        difference = kl.abs().sum() / mask.sum()
        require(
            not is_start or bool(difference <= MAX_START_DIFFERENCE),
            f"the policy differs from the reward's generator by {difference:.2f} nats per token "
            "at its start: make the reward from the model that is trained",
        )
        evidence = self.reward.head.over_generator(natural - start).detach() * mask

        # Groups may be spread over the processes: compute advantages of all R completions.
        evidence = self._gathered(evidence)  # (R, C of the longest)
        kl = self._gathered(kl)
        mask = self._gathered(mask)
        group_size = self.num_generations if is_training else self.num_generations_eval
        advantages = token_advantages(evidence - kl, mask, group_size, self.scale_rewards)
        metrics = self._metrics["train" if is_training else "eval"]
        metrics["crossover/evidence"].append((evidence.sum() / mask.sum()).item())
        metrics["crossover/kl_start"].append((kl.sum() / mask.sum()).item())
        first = self.accelerator.process_index * B
        batch["advantages"] = advantages[first : first + B, :C]
        return batch

    def _gathered(self, values: Tensor) -> Tensor:
        """Return the values (B, C) of all processes as (R, C of the longest), padded with 0."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(values, dim=1))

    def _frozen_log_probs(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Return the completions' log-probabilities (B, C) under the natural model and the start.

        The reward function has computed them for the sequences without padding.
        """
        assert self.reward.read is not None  # TRL has called the reward
        prompts, natural, start = self.reward.read
        masks = batch["prompt_mask"].bool()
        prompt_ids = [
            ids[mask].tolist() for ids, mask in zip(batch["prompt_ids"], masks, strict=True)
        ]
        require(
            prompt_ids == prompts,
            "processing_class must tokenize prompts as the reward's tokenizer does",
        )
        rotary = getattr(self.model.config.get_text_config(), "rope_parameters", None)
        require(
            rotary is not None or bool(masks.all()),
            "the model has no rotary positions: use prompts of equal length",
        )
        C = batch["completion_ids"].size(1)
        device = batch["completion_ids"].device
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        # (B, C): minus one, because the first token of a sequence has no log-probability.
        places = (lengths[:, None] - 1 + torch.arange(C)).clamp(max=natural.size(1) - 1).to(device)
        return natural.to(device).gather(1, places), start.to(device).gather(1, places)

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
