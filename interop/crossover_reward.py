"""The mixture of two Hugging Face models toward which CrossoverTrainer trains.

    python -m interop.crossover_reward --text FILE --generator MODEL --natural_text texts/

Shapes: n natural blocks of T tokens.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.device import allow_tf32
from common.files import reading
from common.process import require, run_main
from interop.causal import CausalModel, CausalReader
from metrics.intervals import better_than_constant
from reward.heads import LikelihoodRewardModel
from training.huggingface import import_optional, load_transformers


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
        pair = (natural, generator)
        vocab_size = common_vocab_size(pair, (natural_tokenizer, self.tokenizer))
        require(
            natural.device == generator.device,
            f"the natural model is on {natural.device}, the generator on {generator.device}: "
            "move one to the other's device",
        )
        models: list[Any] = [CausalModel(each.eval(), vocab_size) for each in pair]
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
        require(is_ids, "fit takes natural tokens: a tensor (n, T) int64, a block a row")
        count, T = blocks.shape
        is_enough = count >= 4 and T >= 2
        require(is_enough, f"{count} blocks of {T} tokens: at least four of two tokens are needed")
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


def common_vocab_size(models: Sequence[Any], tokenizers: Sequence[Any]) -> int:
    """Return the number of token ids that a natural model and a generator have.

    Raise UserError if their vocabularies differ. One vocabulary may be padded to two sizes: if both
    tokenizers are given, they decide.
    """
    sizes = [model.config.get_text_config().vocab_size for model in models]
    vocabularies: list[Any] = sizes
    if None not in tokenizers:
        vocabularies = [ids_below(min(sizes), tokenizer) for tokenizer in tokenizers]
    require(
        vocabularies[0] == vocabularies[1],
        f"the natural model ({sizes[0]} token ids) differs in vocabulary from the generator "
        f"({sizes[1]}): use a model of the same family, or train one on the generator's tokens",
    )
    return min(sizes)


def ids_below(limit: int, tokenizer: Any) -> dict[str, int]:
    """Return the ids below a limit by token."""
    return {token: number for token, number in tokenizer.get_vocab().items() if number < limit}


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
    with reading(name, "pass a folder or a hub name"):
        return auto_class.from_pretrained(name, trust_remote_code=False, **options)


if __name__ == "__main__":
    run_main(
        import_optional("interop.read_text").main,
        "With --reader_path a finished fit is kept; run the same command again.",
    )
