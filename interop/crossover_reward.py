"""The mixture of two Hugging Face models toward which CrossoverTrainer trains.

    python -m examples.trl_task

Shapes: n natural blocks of T tokens.
"""

from typing import Any

import torch
from torch import Tensor

from common.intervals import better_than_constant
from common.process import require
from lm.causal import causal_models, load_pair
from reading.causal import CausalReader
from reward.heads import LikelihoodRewardModel


class CrossoverReward:
    """The likelihood head of two models: how natural each token is.

    natural: the natural model p; generator: q, which the policy starts as. Each is a folder, a hub
    name or a loaded model, and they have one vocabulary.

    weight: w of the mixture m = w p + (1 - w) q; None: call `fit`. tokenizer: of both models; None:
    the generator's, loaded by its name. natural_tokenizer: of a loaded natural model, to compare
    vocabularies that are padded to two sizes. Both models are on one device. Raise UserError if the
    vocabularies differ or a model cannot be loaded.
    """

    def __init__(
        self,
        natural: Any,
        generator: Any,
        *,
        weight: float | None = None,
        tokenizer: Any = None,
        natural_tokenizer: Any = None,
    ) -> None:
        self.given_generator = generator  # a name or a model, as CrossoverTrainer may get it too
        generator, self.tokenizer = load_pair(generator, tokenizer)
        natural, natural_tokenizer = load_pair(natural, natural_tokenizer)
        self.is_fitted = False
        models = causal_models((natural, generator), (natural_tokenizer, self.tokenizer))
        with generator.device:
            self.head = LikelihoodRewardModel(*models)
        if weight is not None:
            self.set_weight(weight)

    def set_weight(self, weight: float) -> None:
        """Set w, the natural model's weight. Near 1 the policy's target is the natural model."""
        require(0 < weight <= 1, f"weight={weight}: must be in (0, 1]; None: call fit()")
        self.head.mixture.data.fill_(weight).logit_(eps=1e-7)
        self.is_fitted = True

    def fit(self, blocks: Tensor) -> dict[str, Any]:
        """Fit the weight on crossover samples of half the natural blocks (n, T) int64.

        Return the figures of the other half: those of Reader.measure, and w as `mixture`. Raise
        UserError if the interval of R2 includes 0, if there are too few blocks for an interval, or
        if the models do not have an id; the reward is then as before.
        """
        is_ids = isinstance(blocks, Tensor) and blocks.dtype == torch.int64 and blocks.dim() == 2
        require(
            is_ids and len(blocks) >= 4 and blocks.size(1) >= 2,
            "fit takes natural tokens: a tensor (n, T) int64, a block a row, at least four blocks "
            "of two tokens",
        )
        T = blocks.size(1)
        reader = CausalReader(self.head, T, ("1",))
        reader.log_scale.requires_grad_(False)  # the reward's evidence has none
        reader.fit(*blocks.chunk(2))
        figures = reader.figures["1"]
        figures["mixture"] = reader.learned.sigmoid().item()
        require(
            better_than_constant(figures["r2_low"]),
            "the reward does not predict where the generator's text begins: use a better natural "
            f"model or more text, or train anyway with weight={figures['mixture']:.3f}",
        )
        self.set_weight(figures["mixture"])
        return figures
