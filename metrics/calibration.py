"""Calibrate a model: find the temperature at which its loss on a text is lowest.

    python evaluate.py --checkpoints a.pt b.pt --part report --calibrate True

A flatter distribution alone lowers the loss of an overconfident model. Therefore fit a temperature
on text that no model was trained on (the select part) before losses are compared: what then differs
is what the models know. Temperature scaling: Guo et al., "On Calibration of Modern Neural Networks"
(arXiv 1706.04599), section 4.2.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from common.device import float64

# Ratio of neighbouring temperatures, and steps to either side, of the coarse and the fine search.
SEARCHES = ((1.15, 5), (1.02, 7))
MIN_GAIN = 1e-4  # nats per token: a search that gains less at its end goes no further


def fit_temperature(losses_at: Callable[[Sequence[float]], Tensor]) -> float:
    """Return the temperature with the lowest mean loss.

    losses_at: returns the losses (K, n) of a text at K temperatures; it is called once for each
    search, and again around a temperature that is at the end of a search.
    """
    best = 1.0
    for ratio, steps in SEARCHES:
        is_at_end = True
        while is_at_end:
            temperatures = [best * ratio**step for step in range(-steps, steps + 1)]
            losses = float64(losses_at(temperatures)).mean(1).tolist()
            place = losses.index(min(losses))
            best = temperatures[place]
            gain = losses[steps] - losses[place]  # over the middle
            is_at_end = place in (0, 2 * steps) and gain > MIN_GAIN
    return best
