"""Heads on hidden states of a frozen trunk: their inputs, their layers and their training.

Shapes: n sequences of T tokens, F channels of an input.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from common.device import random_stream
from common.log import progress
from losses import MAX_LOG_RATIO
from reward.posterior import crossover_loss
from training.optimizers import Best, make_optimizers, take_step

HIDDEN = 256  # width of the hidden layer
LEARNING_RATE = 1e-3  # of AdamW, constant
WEIGHT_DECAY = 0.01  # of AdamW, for matrices
GRAD_CLIP = 1.0  # largest gradient norm
BATCH_SIZE = 64  # sequences
MAX_EPOCHS = 30
PATIENCE = 4  # epochs without a lower selection loss


class Standardize(nn.Module):
    """Subtract a mean and divide by a standard deviation, of each channel; both are stored."""

    mean: Tensor  # (F,)
    std: Tensor  # (F,)

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_channels))
        self.register_buffer("std", torch.ones(num_channels))

    @torch.no_grad()
    def set_statistics(self, batches: Iterable[Tensor]) -> None:
        """Store the statistics of batches (..., F), or of one tensor (n, T, F) of inputs."""
        num_rows = 0
        sums = torch.zeros(2, len(self.mean), dtype=torch.float64, device="cpu")
        for batch in batches:
            # float64 needs the CPU: Apple's devices lack it.
            rows = batch.flatten(0, -2).cpu().double()  # (m, F)
            num_rows += len(rows)
            sums += torch.stack((rows.sum(0), rows.square().sum(0)))
        mean, mean_square = sums / num_rows
        self.mean.copy_(mean)
        self.std.copy_((mean_square - mean.square()).clamp(min=0).sqrt())

    def forward(self, inputs: Tensor) -> Tensor:
        """Return inputs (..., F) as float32 of mean 0 and standard deviation 1.

        A channel that never changes becomes 0.
        """
        return (inputs.float() - self.mean) / self.std.clamp(min=1e-6)


def with_previous(inputs: Tensor) -> Tensor:
    """Append to each token's inputs (B, T, F) those of the token before: (B, T, 2F).

    The first token has zeros in their place.
    """
    previous = nn.functional.pad(inputs[:, :-1], (0, 0, 1, 0))
    return torch.cat((inputs, previous), -1)


class StateHead(nn.Module):
    """Two layers that map the inputs of a token and of the one before to the token's evidence.

    The inputs (B, T, C + 1) are hidden states and, last, the log-probability of the token.
    """

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.standardize = Standardize(num_channels)
        self.layers = nn.Sequential(
            nn.Linear(2 * num_channels, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return evidence log(m/q) (B, T) that tokens are natural, within +-MAX_LOG_RATIO."""
        evidence = self.layers(with_previous(self.standardize(inputs))).squeeze(-1)
        return evidence.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def train_state_head(
    head: StateHead,
    train: tuple[Tensor, Tensor],
    select: tuple[Tensor, Tensor],
    seed: int,
    title: str,
) -> dict[str, Any]:
    """Train a head; keep the epoch with the lowest loss on `select`, and return its figures.

    train, select: inputs (n, T, F) and labels (n, 2) [K/T, (T - K)/T].
    """
    optimizers = make_optimizers(head, learning_rate=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    best = Best(PATIENCE)
    head.zero_grad()  # an interrupted training may have left gradients
    for epoch in progress(title, iterable=range(1, MAX_EPOCHS + 1)):
        order = torch.from_numpy(random_stream(seed, "order", epoch).permutation(len(train[1])))
        for rows in order.split(BATCH_SIZE):
            loss = crossover_loss(head(train[0][rows]), train[1][rows])
            loss.backward()
            take_step(head, optimizers, GRAD_CLIP)
        with torch.no_grad():
            value = crossover_loss(head(select[0]), select[1]).item()
        best.update(value, epoch, head.named_parameters(), {"epoch": epoch, "val_loss": value})
        if best.reason():
            break
    best.restore(head)
    return best.figures
