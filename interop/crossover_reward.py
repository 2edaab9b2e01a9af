"""How natural a text is by Hugging Face models, as a reward function for TRL.

    python -m interop.crossover_reward --text FILE --generator MODEL --natural_text texts/

Shapes: B sequences of T tokens, V token ids; n natural blocks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from common.device import evaluating
from common.files import load_state, reading, save_state
from common.log import print0
from common.process import require, run_main, warn
from interop.samples import Samples, draw_samples
from interop.trunk_head import TrunkHead, copy_tensors
from losses import token_log_probs
from metrics.intervals import better_than_constant
from metrics.reward_skill import describe_skill, measure_skill
from reward.heads import LikelihoodRewardModel, features_of
from reward.mixture import fit_mixture
from reward.posterior import natural_probabilities
from training.huggingface import import_optional, load_transformers

ROWS = 8  # sequences read at a time: their logits are B * T * V numbers
SAMPLES = 2  # crossover samples of a natural block
# Nats per token by which log-probabilities of one model may differ between two precisions
MAX_DIFFERENCE = 0.05
WAY_OUT = "fit the reward again"
Rows = Sequence[Sequence[int]]  # token ids of sequences of any lengths


class CausalModel(nn.Module):
    """A causal model of transformers with the methods of `model.GPT` that a likelihood head calls.

    Its `trunk` returns logits (B, T, V), because what follows the last layer differs by model.
    """

    def __init__(self, model: Any, vocab_size: int) -> None:
        super().__init__()
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

    def rows_at_a_time(self) -> int:
        """Return how many sequences one pass reads."""
        return ROWS


class TwoModels(LikelihoodRewardModel):
    """The likelihood head of two causal models, as CrossoverReward reads and fits it."""

    kind = "a weight of two models"
    missing = "the reward has no weight yet: call its fit(), or pass weight="
    finding = (
        "the reward does not predict where the generator's text begins: "
        "use a better natural model, or more text"
    )

    def fit(self, select: Samples, report: Samples, seed: int) -> tuple[dict[str, Any], Tensor]:
        """Fit the mixture to samples; return figures, and P(natural) (m,) of those to report."""
        log_ratios = features_of(self, select.ids.numpy())
        figures = fit_mixture(self, log_ratios, select.labels().to(log_ratios.device))
        with torch.no_grad():
            prediction = self.share(self.score(features_of(self, report.ids.numpy())))
        return figures, prediction

    def fitted(self) -> dict[str, Tensor]:
        """Return what `fit` changes."""
        return {"mixture": self.mixture.data}


class CrossoverReward:
    """How natural a text is, by the generator's own hidden states or by a second model.

    natural: the natural model p, or None; generator: q, which the policy starts as. Each is a
    folder, a hub name or a loaded model. With p, the reward is the likelihood head of two models of
    one vocabulary. Without it, the reward is a small head on a layer of q, and needs `fit` or
    `load`: see TrunkHead.

    weight: w of the mixture m = w p + (1 - w) q; None: call `fit`. tokenizer: of both models; None:
    the generator's, loaded by its name. natural_tokenizer: of a loaded natural model, to compare
    vocabularies that are padded to two sizes. max_completion_length: the tokens asked for, as in
    GRPOConfig. Both models are on one device. Raise UserError if the vocabularies differ or a model
    cannot be loaded.

    As a reward function of TRL's GRPOTrainer it returns E[K] / T, with T the tokens of the prompt
    and those asked for. Text after an early end could only raise E[K]; stopping early is therefore
    no gain.
    """

    __name__ = "crossover_reward"  # in TRL's records
    head: Any  # TwoModels or TrunkHead, with one interface

    def __init__(
        self,
        natural: Any = None,
        generator: Any = None,
        *,
        weight: float | None = None,
        tokenizer: Any = None,
        natural_tokenizer: Any = None,
        max_completion_length: int = 512,
    ) -> None:
        require(generator is not None, "the reward has no generator: pass its folder or model")
        self.given_generator = generator  # a name or a model, as CrossoverTrainer may get it too
        generator, self.tokenizer = load_pair(generator, tokenizer)
        natural, natural_tokenizer = load_pair(natural, natural_tokenizer)
        self.max_completion_length = max_completion_length  # CrossoverTrainer sets it
        self.device = generator.device
        self.is_fitted = False
        self.figures: dict[str, Any] = {}  # of the last fit
        if natural is None:
            vocab_size = generator.config.get_text_config().vocab_size
            self.head = TrunkHead(CausalModel(generator.eval(), vocab_size))
        else:
            pair = (natural, generator)
            vocab_size = common_vocab_size(pair, (natural_tokenizer, self.tokenizer))
            require(
                natural.device == self.device,
                f"the natural model is on {natural.device}, the generator on {self.device}: "
                "move one to the other's device",
            )
            models: list[Any] = [CausalModel(each.eval(), vocab_size) for each in pair]
            with self.device:
                self.head = TwoModels(*models)
        if weight is not None:
            self.set_weight(weight)

    def set_weight(self, weight: float) -> None:
        """Set w, the natural model's weight. Near 1 the policy's target is the natural model."""
        is_weighted = isinstance(self.head, TwoModels)
        require(is_weighted, f"weight={weight}: a head has none: pass a natural model too")
        require(0 < weight <= 1, f"weight={weight}: must be in (0, 1]; None: call fit()")
        self.head.mixture.data.fill_(weight).logit_(eps=1e-7)
        self.is_fitted = True

    @torch.no_grad()
    def evidence(self, rows: Rows) -> Tensor:
        """Return log(m/q) (B, T) of every token; 0 for the first one and after the end of a row."""
        require(self.is_fitted, self.head.missing)
        padded = [torch.tensor(row, device=self.device) for row in rows]
        ids = pad_sequence(padded, batch_first=True, padding_value=-1)  # (B, T)
        evidence = [self.head.output(part) for part in ids.clamp(min=0).split(ROWS)]
        return torch.cat(evidence).masked_fill(ids < 0, 0.0)

    def token_probabilities(self, rows: Rows) -> Tensor:
        """Return P(token is natural) (B, T) given its whole row; 0 after the end of a row.

        It is 0 at the last token too, because K is less than a row's length.
        """
        probabilities = []
        for row, evidence in zip(rows, self.evidence(rows), strict=True):
            probabilities.append(natural_probabilities(evidence[None, : len(row)])[0])
        return pad_sequence(probabilities, batch_first=True)

    def __call__(self, prompts: Sequence[Any], completion_ids: Rows, **_: Any) -> list[float]:
        """Return E[K] / T of each prompt with its completion."""
        return self.score(self.prompt_ids(prompts), completion_ids)

    def score(self, prompt_ids: Rows, completion_ids: Rows) -> list[float]:
        """Return E[K] / T of each prompt with its completion."""
        rows = [[*prompt, *ids] for prompt, ids in zip(prompt_ids, completion_ids, strict=True)]
        lengths = [len(prompt) + self.max_completion_length for prompt in prompt_ids]
        expected_crossovers = self.token_probabilities(rows).sum(1)  # (B,): E[K]
        return (expected_crossovers.cpu() / torch.tensor(lengths)).tolist()

    def prompt_ids(self, prompts: Sequence[Any]) -> Rows:
        """Return the token ids of prompts, texts or lists of messages, as TRL makes them."""
        require(
            self.tokenizer is not None,
            "the reward has no tokenizer: pass it, or the generator's folder",
        )
        if isinstance(prompts[0], str):
            encoded = self.tokenizer(text=list(prompts))
        else:
            encoded = self.tokenizer.apply_chat_template(
                list(prompts), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        return encoded["input_ids"]

    @contextmanager
    def _unchanged_after_error(self) -> Iterator[None]:
        """Restore what was fitted if an error or Ctrl-C ends the block."""
        before = deepcopy(self.head.fitted())
        try:
            yield
        except BaseException:
            copy_tensors(before, self.head.fitted())
            raise

    def fit(
        self, blocks: Tensor, seed: int = 0, allow_unpredictive: bool = False
    ) -> dict[str, Any]:
        """Fit the weight or the head on crossover samples of half the natural blocks (n, T) int64.

        Return the figures of the other half: those of `metrics.reward_skill.measure_skill` and of
        the fit. Raise UserError, unless it is allowed, if the interval of R2 includes 0 or there
        are too few blocks for an interval. After an error or Ctrl-C the reward is as before.
        """
        is_ids = isinstance(blocks, Tensor) and blocks.dtype == torch.int64 and blocks.dim() == 2
        require(is_ids, "fit takes natural tokens: a tensor (n, T) int64, a block a row")
        count, T = blocks.shape
        is_enough = count >= 4 and T >= 2
        require(is_enough, f"{count} blocks of {T} tokens: at least four of two tokens are needed")
        print0(f"Fitting the reward to {SAMPLES * count:,} crossover samples of {T} tokens")
        samples = draw_samples(self.head.generator.model, blocks, SAMPLES, seed)
        select = samples.pick(samples.blocks < count // 2)
        report = samples.pick(samples.blocks >= count // 2)
        with self._unchanged_after_error():
            figures, prediction = self.head.fit(select, report, seed)
            figures.update(measure_skill(prediction, report.shares(), report.blocks, T))
            # The models are known by their log-probabilities of a sample.
            figures["sample"] = select.ids[0].tolist()
            figures["log_probs"] = self._log_probs(figures["sample"])
            print0(describe_skill(figures))
            if not better_than_constant(figures["r2_low"]):
                way_on = "a program continues with fit(..., allow_unpredictive=True)"
                require(allow_unpredictive, f"{self.head.finding} ({way_on})")
                warn(self.head.finding)
        self.is_fitted = True
        self.figures = figures
        return figures

    def _log_probs(self, sample: Sequence[int]) -> list[float]:
        """Return each model's mean log-probability of the tokens (T,) of a sample."""
        ids = torch.tensor([sample], device=self.device)
        means = []
        for model in self.head.children():
            if isinstance(model, CausalModel):
                log_probs = token_log_probs(model.trunk(ids)[:, :-1], ids[:, 1:])
                means.append(log_probs.mean().item())
        return means

    def save(self, path: str | Path) -> None:
        """Write the fitted weight or head and its figures to a file."""
        require(bool(self.figures), "the reward was not fitted: call its fit() first")
        state = {
            "kind": self.head.kind,
            "tensors": self.head.fitted(),
            "figures": self.figures,
        }
        save_state(path, state)

    def load(self, path: str | Path) -> None:
        """Read what `save` has written for the same models; nothing is executed.

        Raise UserError, and change nothing, if the file is damaged or of other models.
        """
        state = load_state(path, WAY_OUT)
        with reading(path, WAY_OUT), self._unchanged_after_error():
            kind = state["kind"]
            require(kind == self.head.kind, f"it holds {kind}, not {self.head.kind}")
            copy_tensors(state["tensors"], self.head.fitted())
            figures = dict(state["figures"])
            found = self._log_probs(figures["sample"])
            is_same = np.allclose(found, figures["log_probs"], rtol=0, atol=MAX_DIFFERENCE)
            require(is_same, "it was fitted to other models")
        self.is_fitted = True
        self.figures = figures


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
    """Return a model and its tokenizer, both loaded if the model is given by name."""
    refuse_adapter(model)
    if isinstance(model, str):
        if tokenizer is None:
            tokenizer = load_tokenizer(model)
        model = load_model(model)
    return model, tokenizer


def load_model(name: str, dtype: Any = "auto", gguf_file: str | None = None) -> Any:
    """Load a causal model from a folder or the hub onto this process's device; execute nothing.

    gguf_file: the name of a GGUF file there; None: safetensors.
    """
    device = import_optional("accelerate").PartialState().device
    options = {"use_safetensors": True, "dtype": dtype}
    model = loaded("AutoModelForCausalLM", name, gguf_file=gguf_file, **options)
    # Quantized weights are on this process's GPU already, and may not be moved.
    if model.device.type != device.type:
        model = model.to(device)
    return model


def load_tokenizer(name: str, gguf_file: str | None = None) -> Any:
    """Load the tokenizer of a folder or hub name, with the special tokens that TRL demands."""
    tokenizer = loaded("AutoTokenizer", name, gguf_file=gguf_file)
    if tokenizer.eos_token is None:
        # An id beyond the model's is never generated; padding is masked.
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
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
        "With --reward_path a finished fit is kept; run the same command again.",
    )
