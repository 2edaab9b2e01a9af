"""Optimizers, learning-rate schedules, the optimizer step, the best weights and early stopping.

    python -c "from training.optimizers import Schedule; print(Schedule('cosine', 9, 2).factor(5))"

Steps are counted from 0.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from common.process import require

# Share of the steps over which the learning rate falls linearly to 0, by schedule
COOLDOWN = {"cooldown": 0.6, "linear": 1.0}

# By device, of the matrices that Muon orthogonalises: torch has bfloat16 everywhere.
MUON_DTYPES = {"cuda": torch.bfloat16}


class Muon(torch.optim.Muon):
    """torch.optim.Muon with one update for all matrices of the same shape.

    On two CPU cores a step of 0.8M parameters takes 20 ms instead of 64. On a GPU it launches fewer
    kernels. The matrices are orthogonalised in bfloat16 on CUDA, as torch does, else in float32.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        # The base class also accepts a closure.
        (group,) = self.param_groups
        parameters_by_shape: dict[torch.Size, list[Any]] = {}
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameters_by_shape.setdefault(parameter.shape, []).append(parameter)
        for (rows, columns), parameters in parameters_by_shape.items():
            gradients = [parameter.grad for parameter in parameters]
            buffers = []
            for parameter in parameters:
                state = self.state[parameter]
                buffers.append(state.setdefault("momentum_buffer", torch.zeros_like(parameter)))
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            directions = torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"]))
            dtype = MUON_DTYPES.get(directions.device.type, directions.dtype)
            coefficients = group["ns_coefficients"]
            updates = orthogonalised(directions.to(dtype), group["ns_steps"], coefficients)
            updates = updates.to(directions.dtype)
            # Tall matrices take larger steps, as in torch.optim.Muon.
            learning_rate = group["lr"] * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates.unbind(), alpha=-learning_rate)


def orthogonalised(
    matrices: Tensor, steps: int, coefficients: tuple[float, float, float]
) -> Tensor:
    """Bring all singular values of matrices (n, rows, columns) near 1 by Newton-Schulz iterations.

    K. Jordan, 2024, "Muon: an optimizer for hidden layers in neural networks".
    """
    a, b, c = coefficients
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices
    if is_tall:
        x = matrices.mT.contiguous()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class Optimizers:
    """One or two torch optimizers as one; `learning_rate` is that of AdamW, which is the last."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def set_learning_rate_factor(self, factor: float) -> None:
        """Set every learning rate to `factor` times its initial value."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                initial_lr = group.setdefault("initial_lr", group["lr"])
                group["lr"] = initial_lr * factor
                self.learning_rate = group["lr"]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return only the moments: learning rates and weight decay are settings."""
        return {"moments": [optimizer.state_dict()["state"] for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, moments in zip(self.optimizers, state["moments"], strict=True):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
            # The fused kernel checks no sizes: a damaged state would write outside its memory.
            for parameter, loaded in optimizer.state.items():
                for moment in loaded.values():
                    if moment.dim() and moment.shape != parameter.shape:
                        raise ValueError("the shape of a moment differs from that of its weight")


def make_optimizers(
    model: Module,
    optimizer: str = "adamw",
    learning_rate: float = 1e-3,
    weight_decay: float = 0.1,
    beta2: float = 0.95,
) -> Optimizers:
    """Return the optimizers of all parameters that require gradients.

    'adamw': AdamW for all of them. 'muon': Muon (K. Jordan, 2024) for the matrices in the blocks,
    at 5 times the learning rate, and AdamW for the rest. Only matrices decay.
    """
    hidden = []  # matrices in the blocks, for Muon
    matrices = []
    vectors = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.dim() < 2:
            vectors.append(parameter)
        elif optimizer == "muon" and parameter.dim() == 2 and "transformer.h." in name:
            hidden.append(parameter)
        else:
            matrices.append(parameter)
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        optimizers.append(
            Muon(hidden, lr=5 * learning_rate, weight_decay=weight_decay, momentum=0.85)
        )
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # One fused kernel for all tensors saves a third of a small model's step on two CPU cores.
    optimizers.append(torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, beta2), fused=True))
    return Optimizers(optimizers)


class SavedAttributes:
    """Base class that saves and restores the attributes listed in `saved`."""

    saved: ClassVar[tuple[str, ...]]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.saved:
            kind = type(getattr(self, name))
            setattr(self, name, kind(state[name]))  # raises for a value of an impossible type


@dataclass
class Schedule(SavedAttributes):
    """The learning rate of each step as a factor of its peak.

    A resumed run keeps the saved length and warm-up: more steps do not stretch the schedule.
    """

    saved = ("num_steps", "warmup_steps")

    shape: str  # cosine, cooldown, linear or constant
    num_steps: int
    warmup_steps: int
    min_factor: float = 0.0  # at the end of the cosine
    decay_steps: int | None = None  # last step of the cosine; None: num_steps

    def factor(self, step: int) -> float:
        """Return the factor of a step.

        The warm-up rises by (step + 1) / (warmup_steps + 1), as in nanoGPT. The cosine then falls
        to min_factor at decay_steps. The linear cooldown is that of Haegele et al.,
        arXiv:2405.18392.
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.shape == "constant":
            return 1.0
        if self.shape == "cosine":
            progress = 1.0
            decay_steps = self.decay_steps or self.num_steps
            if step < decay_steps:
                progress = (step - self.warmup_steps) / (decay_steps - self.warmup_steps)
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            return self.min_factor + (1 - self.min_factor) * cosine
        cooldown_steps = max(1, COOLDOWN[self.shape] * self.num_steps)
        return min(1.0, max(0, self.num_steps - step) / cooldown_steps)

    def check_num_steps(self, option: str, num_steps: int) -> None:
        """Raise UserError if an option asks for steps whose learning rate would be 0."""
        ends_at_zero = self.shape in COOLDOWN or self.factor(num_steps) == 0
        require(
            num_steps <= self.num_steps or not ends_at_zero,
            f"{option}={num_steps}: the learning rate of lr_schedule={self.shape} is 0 from step "
            f"{self.num_steps} on; use --{option} {self.num_steps}, or retrain",
        )


def take_step(
    model: Module,
    optimizers: Optimizers,
    grad_clip: float,
    scaler: torch.amp.GradScaler | None = None,
) -> float | None:
    """Clip the gradients to a norm of grad_clip (0: do not clip), step, and reset the gradients.

    `scaler` scaled a float16 loss; None: the loss was not scaled. Return the norm before clipping,
    or None if gradients overflowed under a scaler: then the step is skipped. Raise UserError if a
    gradient is not finite in any other case. A finite norm keeps the moments finite.
    """
    if scaler is None:
        scaler = torch.amp.GradScaler("cpu", enabled=False)
    for optimizer in optimizers.optimizers:
        scaler.unscale_(optimizer)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    value = norm.item()  # before the step, so that the GPU does not wait for the CPU twice
    is_finite = math.isfinite(value)
    require(
        is_finite or scaler.is_enabled(),
        "the gradient is not finite: lower the learning rate, or use float32 or bfloat16",
    )
    if is_finite and grad_clip > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm)
    if is_finite:  # the scaler skips only the optimizer whose own gradients overflowed
        for optimizer in optimizers.optimizers:
            scaler.step(optimizer)
    scaler.update()
    optimizers.zero_grad()
    return value if is_finite else None


def num_without_improvement(values: Iterable[float], min_delta: float) -> int:
    """Return how many values follow the last one that was lower by `min_delta` than all before."""
    lowest = math.inf
    count = 0
    for value in values:
        count += 1
        # Tolerance for float rounding: 2.0 - 1.999 is slightly less than 0.001.
        if value < lowest and lowest - value >= min_delta * (1 - 1e-9):
            lowest = value
            count = 0
    return count


class Best(SavedAttributes):
    """Keeps the weights with the lowest value, and their figures; ties keep the earlier ones."""

    saved = ("values", "value", "at", "figures", "weights")

    def __init__(self, patience: int | None = None, min_delta: float = 0.0) -> None:
        """patience: `reason` asks to stop after so many values without a fall by `min_delta`."""
        self.patience = patience
        self.min_delta = min_delta
        self.values: list[float] = []  # of all evaluations
        self.value = math.inf
        self.at = 0  # step or epoch
        self.figures: dict[str, Any] = {}
        self.weights: dict[str, Tensor] = {}

    def update(
        self, value: float, at: int, weights: Iterable[tuple[str, Tensor]], figures: dict[str, Any]
    ) -> None:
        """Add an evaluation; copy the weights of step or epoch `at` if its value is the lowest."""
        self.values.append(value)
        if value < self.value:
            self.value = value
            self.at = at
            self.figures = figures
            self.weights = {name: tensor.detach().clone() for name, tensor in weights}

    def reason(self) -> str:
        """Return the reason to stop, or "" to continue."""
        count = num_without_improvement(self.values, self.min_delta)
        if self.patience is None or count < self.patience:
            return ""
        return f"patience: no improvement of {self.min_delta:.2g} in {self.patience} evaluations"

    def restore(self, model: Module) -> None:
        """Load the kept weights into a model, whose other weights stay as they are."""
        require(bool(self.weights), "no evaluation had a finite value: lower the learning rate")
        model.load_state_dict(self.weights, strict=False)
