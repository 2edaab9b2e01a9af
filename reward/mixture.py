"""The weight of a likelihood head's mixture, fitted to labels.

    python -c "from reward.mixture import fit_mixture; help(fit_mixture)"

p is the natural model, q the generator, and w p + (1 - w) q their mixture.
Shapes: n sequences of N tokens.
"""

from typing import Any

import torch
from torch import Tensor

from common.device import autocast
from common.log import check_finite
from reward.batches import Split, batches_of, labels_of
from reward.heads import LikelihoodRewardModel

MAX_MIXTURE = 20.0  # largest absolute logit of w


def fit_mixture(
    model: LikelihoodRewardModel, select: Split, report: Split
) -> tuple[dict[str, Any], Tensor]:
    """Fit w to the labels of `select`. Return figures, and P(natural) (n,) of `report`."""
    log_ratios = log_ratios_of(model, select)
    targets = labels_of(select, model)
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
    figures = {"epoch": 1, "val_loss": closure().item(), "mixture": w}
    evidence = model.calibrated(log_ratios_of(model, report)).detach()
    return figures, model.share(evidence).cpu()


@torch.no_grad()
def log_ratios_of(model: LikelihoodRewardModel, split: Split) -> Tensor:
    """Return log p - log q (n, N - 1) float32 of all tokens but the first."""
    device = model.mixture.device
    log_ratios = []
    with autocast(device):
        for x in batches_of(split[0], model, "Log-likelihood ratios"):
            natural, written = model.log_probs(x)
            log_ratios.append(natural - written)
    return torch.cat(log_ratios)
