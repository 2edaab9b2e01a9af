"""TRL's GRPOTrainer with an advantage for every token: its evidence less the KL to the start,
against its group's mean.

    python -c "from interop.crossover_trainer import CrossoverTrainer; help(CrossoverTrainer)"

Shapes: B completions of a process, at most C tokens each; R completions of all processes; G of one
prompt."""

from typing import Any

import torch
from accelerate.utils import broadcast, is_peft_model
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from common.process import UserError
from grpo.policy_loss import token_advantages
from interop.crossover_reward import CrossoverReward

PLAIN: dict[str, tuple[Any, ...]] = {
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, None),
    "min_p": (None,),
    "repetition_penalty": (1.0,),
}
PLAIN |= {"generation_kwargs": (None, {}), "vllm_structured_outputs_regex": (None,)}
MOST_DIFFERENCE = 0.1  # nats a token, of one model's log-probabilities in two precisions


class CrossoverTrainer(GRPOTrainer):
    """GRPO with token credit: the reward of a token is log(m/q) - log(pi/q), as in train_grpo.py.

    The reward's generator q is the policy's start. With LoRA give reward and trainer one and the
    same loaded model: q is that with the adapters off. There is no dropout, which the sampled
    policy had not. UserError for other sampling than plain, which the formulas score, for a policy
    that does not start as the reward's generator, and for prompts of several lengths to a model
    without rotary positions, which TRL would read at other places than it was sampled at."""

    def __init__(
        self, model: Any, reward: CrossoverReward, args: GRPOConfig | None = None, **further: Any
    ) -> None:
        args = args or GRPOConfig("trl_model")
        for name, plain in PLAIN.items():
            if (value := getattr(args, name)) not in plain:
                raise UserError(
                    f"ERROR: {name}={value}: must be {plain[0]}, the sampling that the formulas score"
                )
        args.disable_dropout = True
        super().__init__(model=model, reward_funcs=reward, args=args, **further)
        self.reward, policy = reward, self.accelerator.unwrap_model(self.model)
        reward.max_completion_length = args.max_completion_length
        reward.chat_template_kwargs = args.chat_template_kwargs or {}
        # fitted by every process for itself
        reward.head.mixture.data = broadcast(reward.head.mixture.data)
        if is_peft_model(policy):
            if policy.get_base_model() is not reward.head.generator.model:
                raise UserError(
                    "ERROR: with LoRA, give reward and trainer one and the same loaded model"
                )
            reward.head.generator.model = policy  # read with its adapters off
        elif policy is reward.head.generator.model:
            raise UserError(
                "ERROR: the reward holds the model that is trained: name its folder, or train with LoRA"
            )

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch, with advantages (B, C) of tokens."""
        batch = super()._generate_and_score_completions(inputs)
        mode, (B, C) = "train" if self.model.training else "eval", batch["completion_ids"].shape
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)  # (B, C)
        natural, start = self._frozen_log_probs(batch)
        kl = (self._policy_log_probs(batch) - start) * mask
        difference = float(kl.abs().sum() / mask.sum())
        if difference > MOST_DIFFERENCE and self.state.global_step == 0 and mode == "train":
            finding = f"the policy differs from the reward's generator by {difference:.2f} nats a token at its start"
            raise UserError(f"ERROR: {finding}: make the reward of the model that is trained")
        evidence = self.reward.head.over_generator(natural - start).detach() * mask
        everywhere = (self._gathered(values) for values in (evidence, kl, mask))
        evidence, kl, mask = everywhere  # (R, C of the longest)
        G = self.num_generations if mode == "train" else self.num_generations_eval
        advantages = token_advantages(evidence - kl, mask, G, self.scale_rewards)
        first = self.accelerator.process_index * B
        figures = {"evidence": evidence.sum() / mask.sum(), "kl_start": kl.sum() / mask.sum()}
        figures["flat_groups"] = (advantages.view(len(mask) // G, -1) == 0).all(1).float().mean()
        for name, value in figures.items():
            self._metrics[mode][f"crossover/{name}"].append(value.item())
        return {**batch, "advantages": advantages[first : first + B, :C]}

    def _gathered(self, values: Tensor) -> Tensor:
        """Values (B, C) of all processes, (R, C of the longest); 0 after a process's own."""
        return self.accelerator.gather(self.accelerator.pad_across_processes(values, dim=1))

    def _frozen_log_probs(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, C) of the completions' tokens under the natural model and under the
        start."""
        assert self.reward.read is not None  # TRL has called the reward
        prompts, *read = self.reward.read
        lengths, masks = (
            torch.tensor([len(prompt) for prompt in prompts]),
            batch["prompt_mask"].bool(),
        )
        if prompts != [
            ids[mask].tolist() for ids, mask in zip(batch["prompt_ids"], masks, strict=True)
        ]:
            raise UserError(
                "ERROR: processing_class makes other tokens of the prompts than the reward's tokenizer"
            )
        is_rotary = (
            getattr(self.model.config.get_text_config(), "rope_parameters", None) is not None
        )
        if not is_rotary and not masks.all():
            raise UserError(
                "ERROR: prompts of several lengths, and no rotary positions: use prompts of as many tokens"
            )
        C, device = batch["completion_ids"].size(1), batch["completion_ids"].device
        # (B, C): the first token has no log-probability
        places = (lengths[:, None] - 1 + torch.arange(C)).to(device)
        natural, start = (
            part.to(device).gather(1, places.clamp(max=part.size(1) - 1)) for part in read
        )
        return natural, start

    @torch.no_grad()
    def _policy_log_probs(self, batch: dict[str, Any]) -> Tensor:
        """Log-probabilities (B, C) of the completions' tokens under the policy that wrote them."""
        if (known := batch.get("old_per_token_logps")) is not None:
            return known
        ids, seen = (
            torch.cat((batch[f"prompt_{name}"], batch[f"completion_{name}"]), 1)
            for name in ("ids", "mask")
        )
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            return self._get_per_token_logps_and_entropies(
                self.model,
                ids,
                seen,
                batch["completion_ids"].size(1),
                self.args.per_device_train_batch_size,
            )[0]
