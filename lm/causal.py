"""Causal models of transformers: load them, read their logits, and let them complete texts.

    python detect.py --text essay.txt --generator HF_FOLDER --natural_text texts/

Packages: requirements-interop.txt. Shapes: B sequences of T tokens, V token ids; n natural blocks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.device import allow_tf32, evaluating, without_cudnn_attention
from common.files import reading_file
from common.log import progress
from common.process import require
from lm.completions import PLAIN
from lm.huggingface import import_optional, load_transformers
from lm.sampling import Sampling, sampling_distribution

ROWS = 64  # sequences generated at a time
READ_ROWS = 8  # sequences read at a time
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

    def rows_at_a_time(self) -> int:
        """Return how many sequences to read together."""
        return READ_ROWS

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits that `trunk` returned."""
        return hidden


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


# --------------------------------------------------------------------------------------------------
# loading


def causal_models(models: Sequence[Any], tokenizers: Sequence[Any]) -> list[Any]:
    """Return a natural model and a generator as two CausalModels; raise UserError if they differ in
    vocabulary or device.
    """
    vocab_size = common_vocab_size(models, tokenizers)
    natural, generator = models
    require(
        natural.device == generator.device,
        f"the natural model is on {natural.device}, the generator on {generator.device}: "
        "move one to the other's device",
    )
    return [CausalModel(model.eval(), vocab_size) for model in models]


def common_vocab_size(models: Sequence[Any], tokenizers: Sequence[Any]) -> int:
    """Return the number of token ids that a natural model and a generator have.

    Raise UserError if their vocabularies differ. One vocabulary may be padded to two sizes: if both
    tokenizers are given, they decide.
    """
    sizes = [model.config.get_text_config().vocab_size for model in models]
    vocabularies: list[Any] = list(sizes)
    if None not in tokenizers:
        for each, tokenizer in enumerate(tokenizers):
            ids = tokenizer.get_vocab().items()
            vocabularies[each] = {token: number for token, number in ids if number < min(sizes)}
    require(
        vocabularies[0] == vocabularies[1],
        f"the natural model ({sizes[0]} token ids) differs in vocabulary from the generator "
        f"({sizes[1]}): use a model of the same family, or train one on the generator's tokens",
    )
    return min(sizes)


def load_pair(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """Return a model and its tokenizer, both loaded if the model is given by name.

    On CUDA, float32 matrix products use TF32 from now on, as in our own scripts.
    """
    refuse_adapter(model)
    if isinstance(model, str):
        if tokenizer is None:
            tokenizer = load_tokenizer(model)
        model = load_model(model)
    allow_tf32(model.device)
    return model, tokenizer


def load_model(name: str, dtype: Any = "auto") -> Any:
    """Load a causal model from a folder or the hub onto this process's device; execute nothing."""
    device = import_optional("accelerate").PartialState().device
    options = {"use_safetensors": True, "dtype": dtype}
    model = loaded("AutoModelForCausalLM", name, **options)
    # Quantized weights are on this process's GPU already, and may not be moved.
    if model.device.type != device.type:
        model = model.to(device)
    return model


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a folder or hub name, with the special tokens that TRL demands."""
    tokenizer = loaded("AutoTokenizer", name)
    if tokenizer.eos_token is None:
        # The model never generates an id beyond its own, no text has this name, and padding is
        # masked.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        tokenizer.add_special_tokens({"eos_token": "<|unused end|>"})
    tokenizer.padding_side = "left"
    return tokenizer


def refuse_adapter(model: Any) -> None:
    """Raise UserError if a model is the name of a folder that PEFT has written."""
    is_adapter = isinstance(model, str) and Path(model, "adapter_config.json").is_file()
    require(
        not is_adapter,
        f"{model} is an adapter: merge it by AutoPeftModelForCausalLM.from_pretrained(ADAPTER)"
        ".merge_and_unload().save_pretrained(MODEL) of peft, add the tokenizer, and pass MODEL",
    )


def loaded(kind: str, name: str, **options: Any) -> Any:
    """Load `name` as a class of transformers; execute nothing. Raise UserError if it fails."""
    auto_class = getattr(load_transformers(), kind)
    with reading_file(name, "pass a folder or a hub name"):
        return auto_class.from_pretrained(name, trust_remote_code=False, **options)
