"""The weight of a likelihood head's mixture, fitted to labels, and the batches of a split that all
heads read.

    python -c "from reward.mixture import fit_mixture; help(fit_mixture)"

Shapes: n sequences of N tokens.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from common.device import autocast, select_dtype
from common.log import check_finite, counted
from reward.heads import LikelihoodRewardModel, RewardModel

MAX_MIXTURE = 20.0  # logit of the weight w of p

# token ids (n, N) or hidden states (n, ...), and labels (n, 2)
Split = tuple[np.ndarray | Tensor, np.ndarray]
LogProbs = tuple[Tensor, Tensor, Tensor]  # of p and q (n, N - 1); which tokens are natural


def batch_of(x: np.ndarray | Tensor, rows: np.ndarray | slice, model: RewardModel) -> Tensor:
    """Rows of a memory map or a tensor, on the model's device; token ids as int64."""
    part = torch.as_tensor(x[rows])
    return (part.long() if part.dtype == torch.uint16 else part).to(next(model.parameters()).device)


def batches_of(
    split: Split, model: RewardModel, description: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of a split on the model's device, as many sequences at a time as fit."""
    parts = np.array_split(np.arange(len(split[1])), -(-len(split[1]) // model.rows_at_a_time()))
    for rows in counted(parts, len(parts), description):
        yield batch_of(split[0], rows, model), batch_of(split[1], rows, model)


def fit_mixture(
    model: LikelihoodRewardModel, select: Split, report: Split, loss_name: str
) -> tuple[dict, Tensor]:
    """Fit w to the labels; figures, and P(natural) (n,) of the report rows."""
    natural, written, _ = log_probs = log_probs_of_split(model, select)
    ratios = batch_of(natural - written, slice(None), model)
    targets = batch_of(select[1], slice(None), model)
    optimizer = torch.optim.LBFGS([model.mixture], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(model.calibrated(ratios), targets, loss_name)
        check_finite({"val_loss": loss.item(), "the logit of w": model.mixture.item()})
        loss.backward()
        return loss

    optimizer.step(closure)
    model.mixture.data.clamp_(-MAX_MIXTURE, MAX_MIXTURE)
    val_loss, w = closure().item(), model.mixture.sigmoid().item()
    figures = {"epoch": 1, "val_loss": val_loss, "mixture": w, **natural_losses(log_probs, w)}
    natural, written, _ = log_probs = log_probs_of_split(model, report)
    figures |= {f"report_{name}": loss for name, loss in natural_losses(log_probs, w).items()}
    evidence = model.calibrated(batch_of(natural - written, slice(None), model)).detach()
    return figures, torch.cat(
        [model.share(part).cpu() for part in evidence.split(model.rows_at_a_time())]
    )


@torch.no_grad()
def log_probs_of_split(model: LikelihoodRewardModel, split: Split) -> LogProbs:
    """Log-probabilities float32 of a split's tokens but the first, on the CPU."""
    with autocast(device := model.mixture.device, select_dtype("auto", device)):
        batches = (model.log_probs(x) for x, _ in batches_of(split, model, "Log-likelihood ratios"))
        parts = [[log_probs.cpu() for log_probs in each] for each in batches]
    natural, written = map(torch.cat, zip(*parts, strict=True))
    N = written.size(1) + 1
    return natural, written, torch.arange(1, N) < torch.from_numpy(split[1][:, :1] * N).round()


def natural_losses(log_probs: LogProbs, w: float) -> dict[str, float | None]:
    """Mean losses in nats on natural tokens: of p, q and w p + (1 - w) q; None if infinite."""
    natural, written, is_natural = log_probs
    p, q, (log_w, log_rest) = (
        natural[is_natural],
        written[is_natural],
        torch.tensor([w, 1 - w]).log(),
    )
    mixed = {"natural": p, "generator": q, "mixture": torch.logaddexp(p + log_w, q + log_rest)}
    means = {f"{name}_loss": -values.mean().item() for name, values in mixed.items()}
    return {name: mean if math.isfinite(mean) else None for name, mean in means.items()}
