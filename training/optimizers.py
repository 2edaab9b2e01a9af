"""Optimizers, learning-rate schedules, the step, early stopping, the best weights.

    python -c "from training.optimizers import learning_rate_factor; print(learning_rate_factor(50,
    100, 2000, 0.1))"

Schedules take the number of a step, counted from 0.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from common.process import UserError


class Muon(torch.optim.Muon):
    """torch.optim.Muon that, on a CPU, takes matrices of one shape together, in float32: 20 ms, not
    64, at 0.8M."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the base's closure can be a function
        (group,) = self.param_groups
        if group["params"][0].device.type != "cpu":
            super().step()
            return
        learned = [parameter for parameter in group["params"] if parameter.grad is not None]
        for rows, columns in dict.fromkeys(parameter.shape for parameter in learned):
            parameters = [parameter for parameter in learned if parameter.shape == (rows, columns)]
            gradients = [parameter.grad for parameter in parameters]
            buffers = [
                self.state[each].setdefault("momentum_buffer", torch.zeros_like(each))
                for each in parameters
            ]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            directions = torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"]))
            updates = orthogonalised(
                directions, group["ns_steps"], group["ns_coefficients"]
            ).unbind()
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(
                parameters, updates, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5
            )


def orthogonalised(
    matrices: Tensor, steps: int, coefficients: tuple[float, float, float]
) -> Tensor:
    """Matrices (n, rows, columns) with all singular values brought near 1, by Newton-Schulz (K.
    Jordan, 2024)."""
    a, b, c = coefficients
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT.contiguous() if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Optimizers:
    """One or several torch optimizers behind one interface; AdamW is the last, and `learning_rate`
    its rate."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def set_learning_rate_factor(self, factor: float) -> None:
        """Make every learning rate `factor` times the one it was made with."""
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            self.learning_rate = group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"moments": [optimizer.state_dict()["state"] for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, moments in zip(self.optimizers, state["moments"], strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
            for parameter, own in optimizer.state.items():
                if any(moment.dim() and moment.shape != parameter.shape for moment in own.values()):
                    raise ValueError("moments are of another shape than their weight")


def make_optimizers(
    model: Module,
    optimizer: str = "adamw",
    learning_rate: float = 1e-3,
    weight_decay: float = 0.1,
    beta2: float = 0.95,
) -> Optimizers:
    """'adamw': AdamW for all parameters that require gradients; 'muon': Muon (K. Jordan, 2024), at
    5 times the learning rate, for the matrices in the blocks, AdamW for the rest. Matrices decay.
    Raises UserError where nothing can learn."""
    named = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    hidden = [
        name
        for name in named
        if optimizer == "muon" and "transformer.h." in name and named[name].dim() == 2
    ]
    if not named or (optimizer == "muon" and not hidden):
        raise UserError(
            f"ERROR: optimizer={optimizer}: nothing to train: unfreeze a part of the model's blocks"
        )
    matrices = [named.pop(name) for name in hidden]
    muon = (
        [Muon(matrices, lr=5 * learning_rate, weight_decay=weight_decay, momentum=0.85)]
        if matrices
        else []
    )
    decayed, others = (
        [p for p in named.values() if p.dim() >= 2],
        [p for p in named.values() if p.dim() < 2],
    )
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    # One fused kernel for all tensors: on two CPU cores, a third of the loop's time for a small
    # model.
    return Optimizers(
        [*muon, torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, beta2), fused=True)]
    )


def learning_rate_factor(
    step: int, warmup_steps: int, decay_steps: int, min_factor: float
) -> float:
    """Warm-up, (step + 1) / (warmup_steps + 1) as in nanoGPT, then half a cosine to min_factor at
    decay_steps."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / (decay_steps - warmup_steps) if step < decay_steps else 1.0
    return min_factor + (1 - min_factor) * 0.5 * (1 + math.cos(math.pi * progress))


def cooldown_factor(
    step: int, warmup_steps: int, num_steps: int, cooldown: float, min_factor: float
) -> float:
    """Warm-up, 1, a line to min_factor over the last `cooldown` of num_steps, a share (Haegele,
    arXiv:2405.18392)."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    return min_factor + (1 - min_factor) * min(
        1.0, max(0, num_steps - step) / max(1, cooldown * num_steps)
    )


def take_step(
    model: Module, optimizers: Optimizers, grad_clip: float, scaler: torch.amp.GradScaler
) -> float | None:
    """Clip the gradients to a joint norm of grad_clip (0: do not), step, forget them; returns their
    norm before.

    None where they overflowed under a float16 scaler; UserError for others, and for weights or
    moments, not finite."""
    for optimizer in optimizers.optimizers:
        scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    if norm.isfinite() and grad_clip > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm)
    elif not norm.isfinite() and not scaler.is_enabled():
        raise UserError(
            "ERROR: the gradient is not finite: lower the learning rate, or use float32 or bfloat16"
        )
    for optimizer in optimizers.optimizers:
        scaler.step(optimizer)
    scaler.update()
    optimizers.zero_grad()
    kept = [
        tensor
        for each in optimizers.optimizers
        for p, m in each.state.items()
        for tensor in (p, *m.values())
    ]
    if not torch.nn.utils.get_total_norm(kept).isfinite():
        raise UserError(
            "ERROR: a weight or moment is not finite after the step: lower the learning rate"
        )
    return float(norm) if norm.isfinite() else None


class EarlyStopping:
    """Stop when a value has not fallen by `min_delta` in all over the last `patience` evaluations;
    None: never."""

    def __init__(self, patience: int | None, min_delta: float = 0.0) -> None:
        self.patience, self.min_delta = patience, min_delta
        self.best, self.num_without_improvement = math.inf, 0

    def update(self, value: float) -> None:
        """Note an evaluation."""
        self.num_without_improvement += 1
        # Of 2.0 - 1.999 binary makes a hair less than 0.001.
        if value < self.best and self.best - value >= self.min_delta * (1 - 1e-9):
            self.best, self.num_without_improvement = value, 0

    @property
    def reason(self) -> str:
        """Why to stop; empty while there is patience."""
        is_over = self.patience is not None and self.num_without_improvement >= self.patience
        return (
            f"patience: no improvement of {self.min_delta} in {self.patience} evaluations"
            if is_over
            else ""
        )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "num_without_improvement": self.num_without_improvement}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.num_without_improvement = (
            float(state["best"]),
            int(state["num_without_improvement"]),
        )


class Best:
    """The weights of least value that were offered, with what is noted of them; of equals the
    first."""

    def __init__(self) -> None:
        self.value, self.at = math.inf, 0
        self.figures: dict[str, Any] = {}
        self.weights: dict[str, Tensor] = {}

    def offer(
        self, value: float, at: int, weights: Iterable[tuple[str, Tensor]], figures: dict[str, Any]
    ) -> None:
        """Keep a copy of the weights `at` a step or epoch if their value is below the least so
        far."""
        if value < self.value:
            self.value, self.at, self.figures = float(value), at, figures
            self.weights = {name: tensor.detach().clone() for name, tensor in weights}

    def restore(self, model: Module) -> None:
        """Give the model the kept weights; those that were not offered stay."""
        own = model.state_dict()
        if not self.weights or any(
            own[name].shape != weight.shape for name, weight in self.weights.items()
        ):
            raise UserError(
                "ERROR: the saved state has no best weights of this model: delete it, start from scratch"
            )
        model.load_state_dict(self.weights, strict=False)

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({name: type(value)(state[name]) for name, value in vars(self).items()})
