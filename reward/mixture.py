"""The weight of a likelihood head's mixture, fitted to labels.

p is the natural model, q the generator, and w p + (1 - w) q their mixture.
"""

from typing import Any

import torch
from torch import Tensor

from common.log import check_finite
from reward.heads import LikelihoodRewardModel

MAX_MIXTURE = 20.0  # largest absolute logit of w


def fit_mixture(model: LikelihoodRewardModel, log_ratios: Tensor, labels: Tensor) -> dict[str, Any]:
    """Fit w to log p - log q (n, N - 1) of sequences and their labels (n, 2). Return figures."""
    optimizer = torch.optim.LBFGS([model.mixture], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model.loss(model.score(log_ratios), labels)
        check_finite({"val_loss": loss.item()})
        loss.backward()
        return loss

    optimizer.step(closure)
    model.mixture.data.clamp_(-MAX_MIXTURE, MAX_MIXTURE)
    w = model.mixture.sigmoid().item()
    return {"epoch": 1, "val_loss": closure().item(), "mixture": w}
