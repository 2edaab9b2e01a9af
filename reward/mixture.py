"""The weight of a likelihood head's mixture, fitted to labels.

    python -c "from reward.mixture import fit_mixture; help(fit_mixture)"

p is the natural model, q the generator, and w p + (1 - w) q their mixture.
Shapes: n sequences of N tokens.
"""

import math
from typing import Any

import torch
from torch import Tensor

from common.device import autocast, select_dtype
from common.log import check_finite
from reward.batches import Split, batch_of, batches_of
from reward.heads import LikelihoodRewardModel

MAX_MIXTURE = 20.0  # largest absolute logit of w
ALL_ROWS = slice(None)


def fit_mixture(
    model: LikelihoodRewardModel, select: Split, report: Split
) -> tuple[dict[str, Any], Tensor]:
    """Fit w to the labels of `select`. Return figures, and P(natural) (n,) of `report`."""
    natural, written = log_probs_of_split(model, select)
    log_ratios = batch_of(natural - written, ALL_ROWS, model)
    targets = batch_of(select[1], ALL_ROWS, model)
    optimizer = torch.optim.LBFGS([model.mixture], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(model.calibrated(log_ratios), targets)
        check_finite({"val_loss": loss.item(), "the logit of w": model.mixture.item()})
        loss.backward()
        return loss

    optimizer.step(closure)
    model.mixture.data.clamp_(-MAX_MIXTURE, MAX_MIXTURE)
    w = model.mixture.sigmoid().item()
    figures: dict[str, Any] = {"epoch": 1, "val_loss": closure().item(), "mixture": w}
    figures.update(natural_losses(natural, written, select, w))

    natural, written = log_probs_of_split(model, report)
    evidence = model.calibrated(batch_of(natural - written, ALL_ROWS, model)).detach()
    parts = evidence.split(model.rows_at_a_time())
    return figures, torch.cat([model.share(part).cpu() for part in parts])


@torch.no_grad()
def log_probs_of_split(model: LikelihoodRewardModel, split: Split) -> tuple[Tensor, Tensor]:
    """Return log p and log q (n, N - 1) float32 of all tokens but the first, on the CPU."""
    device = model.mixture.device
    natural = []
    written = []
    with autocast(device, select_dtype("auto", device)):
        for x, _ in batches_of(split, model, "Log-likelihood ratios"):
            batch_natural, batch_written = model.log_probs(x)
            natural.append(batch_natural.cpu())
            written.append(batch_written.cpu())
    return torch.cat(natural), torch.cat(written)


def natural_losses(
    natural: Tensor, written: Tensor, split: Split, w: float
) -> dict[str, float | None]:
    """Return mean losses of p, q and their mixture on natural tokens, in nats; None if infinite.

    natural, written: log p and log q (n, N - 1) of the tokens of the split.
    """
    N = written.size(1) + 1
    num_natural = torch.from_numpy(split[1][:, :1] * N).round()  # (n, 1)
    is_natural = torch.arange(1, N) < num_natural
    log_p = natural[is_natural]
    log_q = written[is_natural]
    log_w, log_rest = torch.tensor([w, 1 - w]).log()
    log_mixture = torch.logaddexp(log_p + log_w, log_q + log_rest)
    losses: dict[str, float | None] = {}
    for name, log_probs in (("natural", log_p), ("generator", log_q), ("mixture", log_mixture)):
        loss = -log_probs.mean().item()
        losses[f"{name}_loss"] = loss if math.isfinite(loss) else None
    return losses
