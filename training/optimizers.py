"""Parameter groups, optimizers, learning-rate schedules, gradient clipping, early stopping, the best weights.

    python -c "import optimization; print(optimization.learning_rate_factor(50, 100, 2000, 0.1))"

Knows nothing of models but parameter names; no I/O.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from runtime.files import checked_values
from runtime.process import DivergedError, UserError

# Names of the trunk's blocks, bare or behind the prefix of a wrapper (torch.compile, DDP).
HIDDEN = "transformer.h."


def split_parameters(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> tuple[list, list]:
    """(decayed, not decayed) of the parameters that require gradients: matrices decay; biases and norms do not."""
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    return [p for p in trainable if p.dim() >= 2], [p for p in trainable if p.dim() < 2]


class Muon(torch.optim.Muon):
    """torch.optim.Muon whose step, on a CPU, takes matrices of one shape together and computes in float32.

    The library's goes matrix by matrix in bfloat16: on a CPU without bfloat16 units that took 64 ms for the 16 matrices
    of a model of 0.8M parameters, where this takes 20.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # the base's closure can be a function
        """Move the weights by their gradients; there is no `closure` to be had."""
        if any(parameter.device.type != "cpu" for group in self.param_groups for parameter in group["params"]):
            super().step()
            return
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape.setdefault(parameter.shape, []).append((parameter, parameter.grad))
            for (rows, columns), pairs in by_shape.items():
                parameters, gradients = [parameter for parameter, _ in pairs], [gradient for _, gradient in pairs]
                for parameter in parameters:
                    if "momentum_buffer" not in self.state[parameter]:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
                buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
                torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
                directions = buffers
                if group["nesterov"]:
                    directions = list(torch._foreach_lerp(gradients, buffers, group["momentum"]))
                updates = orthogonalised(torch.stack(directions), group["ns_steps"], group["ns_coefficients"])
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                scale = max(1.0, rows / columns) ** 0.5
                torch._foreach_add_(parameters, list(updates.unbind()), alpha=-group["lr"] * scale)


def orthogonalised(matrices: Tensor, steps: int, coefficients: tuple[float, float, float]) -> Tensor:
    """Matrices (n, rows, columns) with all singular values brought near 1, by Newton-Schulz (K. Jordan, 2024)."""
    a, b, c = coefficients
    tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT.contiguous() if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Optimizers:
    """One or several torch optimizers behind one interface, so that training loops treat all alike."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self._learning_rates = [group["lr"] for group in self._groups]

    @property
    def _groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def set_learning_rate_factor(self, factor: float) -> None:
        """Make every learning rate `factor` times the one it was made with."""
        for group, learning_rate in zip(self._groups, self._learning_rates, strict=True):
            group["lr"] = learning_rate * factor

    @property
    def learning_rate(self) -> float:
        """The current learning rate of the last optimizer, AdamW: the one for logs."""
        return self._groups[-1]["lr"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Move the weights; with a float16 gradient scaler, through it, and update it."""
        for optimizer in self.optimizers:
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
        if scaler is not None:
            scaler.update()

    def moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """What the optimizers keep of a parameter's gradients, by name."""
        states = [optimizer.state[parameter] for optimizer in self.optimizers if parameter in optimizer.state]
        return {name: value for state in states for name, value in state.items() if isinstance(value, Tensor)}

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Divide the gradients by the float16 scaler's factor: before they are clipped."""
        for optimizer in self.optimizers:
            scaler.unscale_(optimizer)

    def state_dict(self) -> dict:
        """Plain containers and tensors: moments and step counts, for `load_state_dict`."""
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict) -> None:
        """Restore moments and step counts. Rates, decay and the like stay as they are set now: settings rule.

        Raises UserError where the state is that of other optimizers or parameters.
        """
        states = checked_values(state, {"optimizers": (list,)})["optimizers"]
        if len(states) != len(self.optimizers):
            raise UserError(
                f"ERROR: the saved state has {len(states)} optimizer(s), these settings {len(self.optimizers)}"
            )
        for optimizer, saved in zip(self.optimizers, states, strict=True):
            settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            try:
                optimizer.load_state_dict(saved)
            except ValueError as error:
                raise UserError(f"ERROR: the saved optimizer state does not fit this model: {error}") from None
            for group, own in zip(optimizer.param_groups, settings, strict=True):
                group.update(own)
            learned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for parameter in learned if optimizer.state else ():
                _check_moments(optimizer.state[parameter], parameter)


def _check_moments(moments: Any, parameter: Tensor) -> None:
    """Raise UserError unless a parameter's state is one of Muon or AdamW, finite, and of the parameter's shape."""
    names = ("momentum_buffer",) if "momentum_buffer" in moments else ("step", "exp_avg", "exp_avg_sq")
    for name, value in checked_values(moments, dict.fromkeys(names, (Tensor,))).items():
        shape = torch.Size([]) if name == "step" else parameter.shape
        if value.shape != shape or value.layout != torch.strided or value.is_meta or not value.isfinite().all():
            raise UserError(f"ERROR: {name} of the saved optimizer state does not fit this model")


def make_optimizers(
    model: nn.Module,
    optimizer: str = "adamw",
    learning_rate: float = 1e-3,
    muon_learning_rate: float = 0.02,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    muon_momentum: float = 0.95,
) -> Optimizers:
    """Optimizers for the model's parameters that require gradients.

    'adamw': AdamW for all. 'muon': Muon (K. Jordan, 2024), at muon_learning_rate, for the matrices in
    `transformer.h.*`; AdamW for embeddings, heads, norms and biases. Weight decay goes to tensors of two or more
    dimensions. Raises UserError where nothing is trainable, or 'muon' finds no matrix.
    """
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not named:
        raise UserError("ERROR: no parameter of the model requires gradients: nothing to train; unfreeze a part of it")
    made: list[torch.optim.Optimizer] = []
    if optimizer == "muon":
        hidden = [parameter for name, parameter in named if HIDDEN in name and parameter.dim() == 2]
        if not hidden:
            raise UserError(f"ERROR: optimizer=muon found no trainable matrix in {HIDDEN}*: use optimizer=adamw")
        made.append(Muon(hidden, lr=muon_learning_rate, weight_decay=weight_decay, momentum=muon_momentum))
        named = [(name, parameter) for name, parameter in named if HIDDEN not in name or parameter.dim() != 2]
    elif optimizer != "adamw":
        raise UserError(f"ERROR: optimizer={optimizer!r} is not known: use adamw or muon")
    decayed, not_decayed = split_parameters(named)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if groups:
        # One fused kernel for all tensors: on two CPU cores, a third of the loop's time for a small model.
        fused = named[0][1].device.type in ("cuda", "cpu")
        made.append(torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=fused))
    return Optimizers(made)


def learning_rate_factor(step: int, warmup_steps: int, decay_steps: int, min_factor: float) -> float:
    """The factor of the learning rate at a step, counted from 0 (nanoGPT's convention).

    (step + 1) / (warmup_steps + 1) while step < warmup_steps, then half a cosine from 1 down to min_factor at
    decay_steps, and min_factor from there on.
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    if step >= decay_steps:
        return min_factor
    progress = (step - warmup_steps) / (decay_steps - warmup_steps)
    return min_factor + (1 - min_factor) * 0.5 * (1 + math.cos(math.pi * progress))


def cooldown_factor(step: int, warmup_steps: int, num_steps: int, cooldown: float, min_factor: float) -> float:
    """Warm-up as `learning_rate_factor`'s, then 1, then a straight line down to min_factor.

    The line takes the last `cooldown` of num_steps, a share (Haegele et al. 2024, arXiv:2405.18392).
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    left = max(0, num_steps - step) / max(1, cooldown * num_steps)
    return min_factor + (1 - min_factor) * min(1.0, left)


def clip_gradients(
    parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]], max_norm: float, error_if_nonfinite: bool = True
) -> float:
    """Scale gradients in place so that their joint 2-norm is at most max_norm (0: leave them); the norm before that.

    Takes `model.parameters()` or, for errors that name the culprit, `model.named_parameters()`. DivergedError for a
    gradient that is NaN or infinite, before anything is scaled. error_if_nonfinite=False is for float16 with a
    gradient scaler alone, which skips such steps itself; the gradients are then left as they are.
    """
    named = [item if isinstance(item, tuple) else (f"parameter {i}", item) for i, item in enumerate(parameters)]
    named = [(name, parameter) for name, parameter in named if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for _, parameter in named])
    value = float(norm)
    if not math.isfinite(value):
        if error_if_nonfinite:
            bad = [f"{name} {tuple(p.shape)}" for name, p in named if not bool(p.grad.isfinite().all())]
            what = f"the gradient of {bad[0]}" if bad else "the norm of the gradients"
            more = f" (and of {len(bad) - 1} more)" if len(bad) > 1 else ""
            raise DivergedError(
                f"ERROR: {what}{more} is not finite: lower the learning rate, or use float32 or bfloat16"
            )
    elif max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_([parameter for _, parameter in named], max_norm, norm)
    return value


def take_step(model: nn.Module, optimizers: Optimizers, grad_clip: float, scaler: torch.amp.GradScaler) -> float | None:
    """Clip the gradients of a model, move its weights by them, and forget them; returns their norm before clipping.

    None, and no step, where gradients overflowed under a float16 scaler, which then scales less. Without one (a scaler
    that is not enabled) DivergedError for them; and always for what the step has made NaN or infinite.
    """
    optimizers.unscale(scaler)
    strict = not scaler.is_enabled()
    norm = clip_gradients(model.named_parameters(), grad_clip, error_if_nonfinite=strict)
    optimizers.step(scaler)
    optimizers.zero_grad()
    check_step(model, optimizers)
    return norm if math.isfinite(norm) else None


def check_step(model: nn.Module, optimizers: Optimizers) -> None:
    """Raise DivergedError for a weight of a model that a step has made NaN or infinite, or a moment of an optimizer.

    Without it the next step would find the weight, and an interruption before that save it; a second moment that is
    infinite, of a gradient whose square overflows, would never be found, and its weight never move again.
    """
    named: list[tuple[str, Tensor]] = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    named += [
        (f"the {kind} of {name}", moment)
        for name, parameter in list(named)
        for kind, moment in optimizers.moments(parameter).items()
    ]
    if math.isfinite(torch.nn.utils.get_total_norm([tensor for _, tensor in named])):
        return
    bad = [f"{name} {tuple(tensor.shape)}" for name, tensor in named if not bool(tensor.isfinite().all())]
    if bad:  # else the squares alone are infinite
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise DivergedError(f"ERROR: {bad[0]}{more} is not finite after the step: lower the learning rate")


def gradient_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """What scales losses, so that float16 gradients do not vanish; for other dtypes it does nothing."""
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)


class EarlyStopping:
    """Says when to stop: the value has not improved by at least `min_delta` over the last `patience` evaluations.

    `best` is the value of the last improvement, and the bar for the next: small steps that add up to min_delta within
    the patience count. patience None never stops. Equal values never improve, not even at min_delta 0. A value that is
    NaN or infinite raises DivergedError: the weights behind it will not recover, so waiting would only hide the fault.
    """

    def __init__(self, patience: int | None, min_delta: float = 0.0, mode: str = "min") -> None:
        if mode not in ("min", "max"):
            raise UserError(f"ERROR: mode={mode!r} is not known: use min or max")
        if patience is not None and patience < 1:
            raise UserError(f"ERROR: patience={patience}: must be >= 1, or None to never stop")
        if not 0 <= min_delta < math.inf:
            raise UserError(f"ERROR: min_delta={min_delta}: must be finite and >= 0")
        self.patience, self.min_delta, self.mode = patience, min_delta, mode
        self.best: float | None = None
        self.num_without_improvement = 0

    def update(self, value: float) -> bool:
        """Note an evaluation; returns whether it is an improvement (the first always is)."""
        value = float(value)
        if not math.isfinite(value):
            raise DivergedError(f"ERROR: the value watched for early stopping is {value}: training has diverged")
        if self.best is not None:
            gain = self.best - value if self.mode == "min" else value - self.best
            # 2.0 - 1.999 is a hair under 0.001 in binary, and meant to be 0.001.
            enough = gain >= self.min_delta or math.isclose(gain, self.min_delta, rel_tol=1e-9)
            if not (gain > 0 and enough):
                self.num_without_improvement += 1
                return False
        self.best = value
        self.num_without_improvement = 0
        return True

    @property
    def should_stop(self) -> bool:
        """Whether the patience has run out."""
        return self.patience is not None and self.num_without_improvement >= self.patience

    @property
    def reason(self) -> str | None:
        """Why to stop; None while there is patience."""
        if not self.should_stop:
            return None
        return f"patience: no improvement of {self.min_delta} in {self.patience} evaluations"

    def state_dict(self) -> dict[str, float | int | None]:
        """Best value and counter; patience, min_delta and mode are settings."""
        return {"best": self.best, "num_without_improvement": self.num_without_improvement}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        vars(self).update(checked_values(state, {"best": (float, type(None)), "num_without_improvement": (int,)}))


def load_some(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Set some of a model's weights; UserError for others than its own, of other shapes, or that are not finite."""
    own = model.state_dict()
    for name, weight in weights.items():
        if name not in own or not isinstance(weight, Tensor) or weight.shape != own[name].shape:
            raise UserError("ERROR: the saved weights do not fit this model")
        if weight.layout != torch.strided or weight.is_meta or not weight.isfinite().all():
            raise UserError(f"ERROR: the saved {name} is no plain tensor of finite numbers")
    model.load_state_dict(weights, strict=False)


class Best:
    """The weights of least value that were offered, with what is noted of them; of equals the first."""

    def __init__(self) -> None:
        self.value, self.at = math.inf, 0
        self.figures: dict[str, Any] = {}
        self.weights: dict[str, Tensor] | None = None  # None: none was offered, or they are written already

    def offer(
        self,
        value: float,
        at: int,
        weights: Iterable[tuple[str, Tensor]],
        figures: dict[str, Any],
        any_value: bool = False,
    ) -> None:
        """Keep a copy of the weights `at` a step or epoch if their value is below the least so far, or `any_value`."""
        if value < self.value or any_value:
            self.value, self.at, self.figures = float(min(value, self.value)), at, figures
            self.weights = {name: tensor.detach().clone() for name, tensor in weights}

    def restore(self, model: nn.Module) -> None:
        """Give the model the kept weights; those that were not offered stay."""
        if self.weights is None:
            raise UserError("ERROR: the saved state has no weights that were kept: start with --init_from scratch")
        load_some(model, self.weights)

    def state_dict(self) -> dict[str, Any]:
        """Value, step or epoch, figures and weights."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict()`."""
        if isinstance(state, dict) and type(state.get("value")) is int:  # of an earlier version
            state = {**state, "value": float(state["value"])}
        kinds = {"value": (float,), "at": (int,), "figures": (dict,), "weights": (dict, type(None))}
        vars(self).update(checked_values(state, kinds))


class TrainableWeights:
    """Those weights of a model that require gradients, as a part of a run's state."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]

    def state_dict(self) -> dict[str, Tensor]:
        """The weights by name."""
        return {name: weight.detach() for name, weight in self.named}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Set the weights; what is frozen stays."""
        if not isinstance(state, dict) or state.keys() != {name for name, _ in self.named}:
            raise UserError("ERROR: the saved weights are not those that this run trains")
        load_some(self.model, state)
