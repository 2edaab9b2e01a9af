"""A causal model of transformers as our scripts see one: its logits, its texts, and its reader.

    python -m interop.crossover_reward --text FILE --generator MODEL --natural_text texts/

Shapes: B sequences of T tokens, V token ids, C channels; n natural blocks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from common.device import evaluating, without_cudnn_attention
from common.log import progress
from common.process import require
from generation.completions import PLAIN
from generation.sampling import Sampling, sampling_distribution
from reward.reader import WAYS, Reader
from training.huggingface import load_transformers

ROWS = 64  # sequences generated at a time
CROSSOVERS = 16  # different crossovers; samples of one crossover are generated together


class CausalModel(nn.Module):
    """A causal model of transformers with the methods of `model.GPT` that a likelihood head calls.

    Its `trunk` returns logits (B, T, V), because what follows the last layer differs by model.
    """

    def __init__(self, model: Any, vocab_size: int) -> None:
        super().__init__()
        require(
            all(weight.numel() for weight in model.get_output_embeddings().parameters()),
            "the model's output layer is empty, as after loading with DeepSpeed ZeRO stage 3: load "
            "all models before you make GRPOConfig, or use FSDP2 or ZeRO stage 2",
        )
        self.model = model
        self.vocab_size = vocab_size

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Disable dropout, gradients and adapters."""
        without_adapters = getattr(self.model, "disable_adapter", nullcontext)
        with evaluating(self.model), without_adapters():
            yield

    def outputs(self, idx: Tensor, **options: Any) -> Any:
        """Return what the frozen model returns for sequences (B, T).

        Only right padding is allowed.
        """
        with self.frozen():
            return self.model(input_ids=idx, use_cache=False, **options)

    def trunk(self, idx: Tensor) -> Tensor:
        """Return the logits (B, T, V) of sequences (B, T): see `outputs`."""
        return self.outputs(idx).logits

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that `trunk` returned."""
        return hidden


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
        self.layer = self.generator.model.config.get_text_config().num_hidden_layers // 2
        self.start = torch.tensor(start, dtype=torch.int64)

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


@torch.no_grad()
def complete(
    model: Any, natural: Tensor, crossovers: Tensor, seed: int, ways: Sequence[Sampling] = (PLAIN,)
) -> Tensor:
    """Return blocks (n, T) that keep crossovers (n,) natural tokens; a model generates the rest.

    natural: (n, T) int64, on the CPU; as many of each sampling setting, one way after the other.
    """
    n, T = natural.shape
    way_of = torch.arange(len(ways)).repeat_interleave(n // len(ways))
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", T)
    require(positions >= T, f"blocks of {T} tokens: the generator reads at most {positions}")
    ids = natural.clone()
    model = copy(model)  # shares the weights; only its generation_config is another
    options = {"do_sample": True, "top_k": 0, "pad_token_id": 0}
    model.generation_config = load_transformers().GenerationConfig(**options)
    different = crossovers.unique().tolist()
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices), without_cudnn_attention():
        torch.manual_seed(seed)
        for crossover in progress("Crossovers", iterable=different):
            for rows in (crossovers == crossover).nonzero()[:, 0].split(ROWS):
                # Texts of all ways are generated together.
                counts = way_of[rows].bincount(minlength=len(ways)).tolist()
                prompts = natural[rows, :crossover].to(model.device)
                written = model.generate(
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    max_new_tokens=T - crossover,
                    logits_processor=[partial(distributions, ways, counts)],
                )
                ids[rows] = written.cpu()
    return ids


def distributions(
    ways: Sequence[Sampling], counts: Sequence[int], ids: Tensor, logits: Tensor
) -> Tensor:
    """Return log-probabilities (R, V) of next tokens, for the numbers of rows of each way."""
    parts = zip(logits.split(counts), ways, strict=True)
    return torch.cat([sampling_distribution(part, way) for part, way in parts])
