"""Parameters of a reward model or a reader that are few enough for L-BFGS.

p is the natural model, q the generator, and w p + (1 - w) q their mixture.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from common.log import check_finite
from reward.heads import LikelihoodRewardModel

MAX_MIXTURE = 20.0  # largest absolute logit of w


def minimize(parameters: list[Tensor], loss: Callable[[], Tensor]) -> None:
    """Minimize a loss () of some parameters; raise UserError if it is not finite."""
    optimizer = torch.optim.LBFGS(parameters, max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        check_finite({"val_loss": value.item()})
        value.backward()
        return value

    optimizer.step(closure)


def fit_mixture(model: LikelihoodRewardModel, log_ratios: Tensor, labels: Tensor) -> dict[str, Any]:
    """Fit w to log p - log q (n, N - 1) of sequences and their labels (n, 2). Return figures."""

    def loss() -> Tensor:
        return model.loss(model.score(log_ratios), labels)

    minimize([model.mixture], loss)
    model.mixture.data.clamp_(-MAX_MIXTURE, MAX_MIXTURE)
    w = model.mixture.sigmoid().item()
    return {"epoch": 1, "val_loss": loss().item(), "mixture": w}
