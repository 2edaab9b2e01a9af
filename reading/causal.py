"""Read texts of causal models of transformers.

    python detect.py --text essay.txt --generator HF_FOLDER --natural_text texts/

Packages: requirements-interop.txt. Shapes: B texts of T tokens, V token ids, C channels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from common.process import require
from lm.causal import CROSSOVERS, complete
from lm.sampling import Sampling
from reading.reader import WAYS, Reader

# Tokens of a window of a long text: a model that wrote with more before it is known by that
WINDOW = 256


class CausalReader(Reader):
    """The reader of a CausalModel, or of a LikelihoodRewardModel of two.

    A model alone also gives the hidden states of its middle layer. Those of a small model do not
    show where its text begins; those of a released model of 135M parameters do.
    """

    report_blocks = 32  # fewer, because a released model takes minutes
    distinct = CROSSOVERS

    def __init__(
        self, model: Any, length: int, ways: Sequence[str] = WAYS, start: Sequence[int] = ()
    ) -> None:
        """length: T, the tokens of a text to fit. start: ids that come before each text."""
        super().__init__(model, length, ways)
        config = self.generator.model.config.get_text_config()
        self.layer = config.num_hidden_layers // 2
        self.start = torch.tensor(start, dtype=torch.int64)
        positions = getattr(config, "max_position_embeddings", WINDOW)
        self.window = min(WINDOW, positions) - len(start)

    def started(self, ids: Tensor) -> Tensor:
        """Return ids (B, T) behind those that come before each text.

        Raise UserError if the model does not have an id.
        """
        low, high = ids.aminmax()
        size = self.generator.vocab_size
        require(
            bool(low >= 0 and high < size),
            f"token ids from {low} to {high}: must be at least 0 and less than {size}: use the "
            "model's tokenizer",
        )
        return torch.cat((self.start.to(ids.device).expand(len(ids), -1), ids), 1)

    def outputs(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids = self.started(ids)
        begin = len(self.start)
        if self.pair is None:
            outputs = self.generator.outputs(ids, output_hidden_states=True)
            states = outputs.hidden_states[self.layer][:, begin + 1 :]
            return torch.zeros(()), outputs.logits[:, begin:-1], states
        natural, logits, states = super().outputs(ids)
        return natural[:, begin:], logits[:, begin:], states[:, begin:]

    def write(
        self, natural: Tensor, crossovers: Tensor, ways: Sequence[Sampling], seed: int
    ) -> Tensor:
        begin = len(self.start)
        blocks = self.started(natural.cpu())
        texts = complete(self.generator.model, blocks, crossovers + begin, seed, ways)
        return texts[:, begin:].to(self.device)
