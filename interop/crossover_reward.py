"""The likelihood head of two Hugging Face models, and a reward function for TRL: one number a
sequence.

    python -c "from interop.crossover_reward import CrossoverReward; help(CrossoverReward)"

Shapes: B sequences of T tokens, V token ids; n natural blocks.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from common.device import random_stream
from common.log import counted, print0
from common.process import UserError, warn
from interop.huggingface import import_optional, load_transformers
from metrics.reward_skill import better_than_constant, describe_skill, measure_skill
from model import GPTConfig
from reward.heads import LikelihoodRewardModel
from reward.mixture import fit_mixture
from reward.posterior import natural_probabilities

ROWS = 8  # sequences read or written at a time: their logits are B * T * V numbers
SAMPLES = 2  # crossover samples of a natural block
WAY_OUT = "take a model of the same family, or train one on the generator's tokens"
Rows = Sequence[Sequence[int]]  # token ids of sequences, of any lengths


class CausalModel(nn.Module):
    """A causal model of transformers with those methods of `model.GPT` that a likelihood head
    calls.

    Its `trunk` gives logits (B, T, V): what a model does to them after its last layer stays its
    own."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        super().__init__()
        self.model, self.config = model, GPTConfig(vocab_size=vocab_size)

    def trunk(self, idx: Tensor, context: None = None) -> Tensor:
        """Logits (B, T, V) of sequences (B, T), padded on the right if at all; adapters of the
        model are off."""
        was_training = self.model.training
        with getattr(self.model, "disable_adapter", nullcontext)():
            logits = self.model.eval()(input_ids=idx, use_cache=False).logits
        self.model.train(was_training)
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits that `trunk` gave."""
        return hidden

    def rows_at_a_time(self) -> int:
        """Sequences to read together."""
        return ROWS


class CrossoverReward:
    """How natural text is, by two causal models of one vocabulary: p, the natural model, and q, the
    generator.

    natural, generator: folders, hub names, or loaded models. weight: w of the mixture m = w p + (1
    - w) q; None: `fit` finds it. tokenizer: of both; None: the generator's, by its name.
    max_completion_length: as in GRPOConfig, the tokens asked for. natural_bits: 4 or 8, to read p
    in (needs bitsandbytes). UserError for models of two vocabularies, and for those that cannot be
    loaded.

    As a reward function of TRL's GRPOTrainer it gives E[K] / T, T the tokens of the prompt and
    those asked for. Whatever text might follow an early end, it could only raise E[K]: to stop is
    no gain. After each call `read` holds the prompts' ids, and the log-probabilities of
    `log_probs`."""

    __name__ = "crossover_reward"  # in TRL's records

    def __init__(
        self,
        natural: Any,
        generator: Any,
        *,
        weight: float | None = None,
        tokenizer: Any = None,
        max_completion_length: int = 512,
        natural_bits: int | None = None,
    ) -> None:
        if tokenizer is None and isinstance(generator, str):
            tokenizer = load_tokenizer(generator)
        self.tokenizer, self.max_completion_length = tokenizer, max_completion_length
        # as in GRPOConfig; CrossoverTrainer sets both
        self.chat_template_kwargs: dict[str, Any] = {}
        models = [load_model(natural, natural_bits) if isinstance(natural, str) else natural]
        models += [load_model(generator) if isinstance(generator, str) else generator]
        sizes = [each.config.get_text_config().vocab_size for each in models]
        is_same = sizes[0] == sizes[1]
        # one vocabulary may be padded to two sizes
        if tokenizer is not None and isinstance(natural, str):
            ids, others = (
                {word: number for word, number in each.get_vocab().items() if number < min(sizes)}
                for each in (tokenizer, load_tokenizer(natural))
            )
            is_same = ids == others
        if not is_same:
            finding = f"the natural model ({sizes[0]} token ids) has another vocabulary than the generator ({sizes[1]})"
            raise UserError(f"ERROR: {finding}: {WAY_OUT}")
        if models[0].device != models[1].device:
            places = (
                f"the natural model is on {models[0].device}, the generator on {models[1].device}"
            )
            raise UserError(f"ERROR: {places}: move one to the other's device")
        parts: list[Any] = [CausalModel(each.eval(), min(sizes)) for each in models]
        self.head = LikelihoodRewardModel(*parts)
        self.head.mixture.data = self.head.mixture.data.to(models[0].device)
        self.has_weight = False
        self.read: tuple[Rows, Tensor, Tensor] | None = None
        if weight is not None:
            self.set_weight(weight)

    def set_weight(self, weight: float) -> None:
        """Give the natural model this weight in the mixture; near 1 the target of training is that
        model itself."""
        if not 0 < weight <= 1:
            raise UserError(f"ERROR: weight={weight}: must be > 0 and <= 1; None lets fit find it")
        self.head.mixture.data.fill_(weight).logit_(eps=1e-7)
        self.has_weight = True

    @torch.no_grad()
    def log_probs(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Log-probabilities (B, T - 1) float32 of all tokens but the first under p and q; 0 after a
        row's end."""
        # (B, T)
        ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(
            self.head.mixture.device
        )
        pairs = [self.head.log_probs(part) for part in ids.split(ROWS)]
        after = torch.arange(1, ids.size(1)) >= torch.tensor([len(row) for row in rows])[:, None]
        natural, written = (
            torch.cat(part).masked_fill(after.to(ids.device), 0.0)
            for part in zip(*pairs, strict=True)
        )
        return natural, written

    def evidence(self, rows: Rows) -> Tensor:
        """log(m/q) (B, T) of every token; 0 for the first one, and after a row's end."""
        natural, written = self.log_probs(rows)
        return self.head.calibrated(natural - written).detach()

    def token_probabilities(self, rows: Rows) -> Tensor:
        """P(token is natural) (B, T), given its whole row, whose last token counts as written; 0
        after a row's end."""
        return probabilities_of_rows(self.evidence(rows), [len(row) for row in rows])

    def __call__(self, prompts: Sequence[Any], completion_ids: Rows, **_: Any) -> list[float]:
        """E[K] / T of each prompt with its completion."""
        if not self.has_weight:
            raise UserError(
                "ERROR: the reward has no weight yet: call its fit(blocks), or give it weight="
            )
        prompt_ids = self.prompt_ids(prompts)
        rows = [
            [*prompt, *written] for prompt, written in zip(prompt_ids, completion_ids, strict=True)
        ]
        asked = [len(prompt) + self.max_completion_length for prompt in prompt_ids]
        natural, written = self.log_probs(rows)
        self.read = prompt_ids, natural, written
        evidence = self.head.calibrated(natural - written).detach()
        # (B,): E[K]
        crossovers = probabilities_of_rows(evidence, [len(row) for row in rows]).sum(1)
        return (crossovers.cpu() / torch.tensor(asked)).tolist()

    def prompt_ids(self, prompts: Sequence[Any]) -> Rows:
        """Token ids of prompts, texts or lists of messages, as TRL makes them."""
        if self.tokenizer is None:
            raise UserError(
                "ERROR: the reward has no tokenizer: give it tokenizer=, or name the generator's folder"
            )
        if isinstance(prompts[0], str):
            return self.tokenizer(text=list(prompts))["input_ids"]
        template = {
            "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": True,
            **self.chat_template_kwargs,
        }
        return self.tokenizer.apply_chat_template(list(prompts), **template)["input_ids"]

    def fit(
        self, blocks: Tensor, seed: int = 0, allow_unpredictive: bool = False
    ) -> dict[str, Any]:
        """Fit the weight on crossover samples of half the natural blocks (n, T) int64; figures of
        the other half.

        They are `metrics.reward_skill.measure_skill`'s, and those of `reward.mixture.fit_mixture`.
        UserError where the interval of R2 includes 0, or there are too few blocks for one, unless
        that is allowed."""
        (count, T), draw = blocks.shape, random_stream(seed, "fit")
        if count < 2 or T < 2:
            raise UserError(f"ERROR: {count} blocks of {T} tokens: two at least of two are needed")
        crossovers = torch.from_numpy(draw.integers(1, T, size=count * SAMPLES))
        ids = complete(
            self.head.generator.model, blocks.repeat_interleave(SAMPLES, 0), crossovers, seed
        )
        shares = (crossovers / T).float()
        labels = torch.stack((shares, 1 - shares), 1).numpy()
        half = count // 2 * SAMPLES
        parts = [(ids[rows].numpy(), labels[rows]) for rows in (slice(half), slice(half, None))]
        figures, prediction = fit_mixture(self.head, parts[0], parts[1], "nll")
        numbers = torch.arange(count).repeat_interleave(SAMPLES)[half:]
        figures |= measure_skill(prediction, shares[half:], numbers, T, seed)
        print0(f"Weight of the natural model: {figures['mixture']:.3f}\n{describe_skill(figures)}")
        if not better_than_constant(figures["r2_low"]):
            finding = "the reward does not predict where the generator's text begins: take a better natural model"
            if not allow_unpredictive:
                raise UserError(f"ERROR: {finding}, or more text")
            warn(f"{finding}; going on, as allowed")
        self.has_weight = True
        return figures


def probabilities_of_rows(evidence: Tensor, lengths: Sequence[int]) -> Tensor:
    """P(token is natural) (B, T) from evidence (B, T) of rows of several lengths; 0 after a row's
    end."""
    # K is less than a row's length
    impossible = torch.arange(evidence.size(1)) >= torch.tensor(lengths)[:, None] - 1
    return natural_probabilities(evidence.masked_fill(impossible.to(evidence.device), -torch.inf))


@torch.no_grad()
def complete(model: Any, natural: Tensor, crossovers: Tensor, seed: int) -> Tensor:
    """Blocks (n, T) that are natural up to crossovers (n,) and written by a model after it, at
    temperature 1."""
    T, ids, device, batches = natural.size(1), natural.clone(), model.device, list[list[int]]()
    room = getattr(model.config.get_text_config(), "max_position_embeddings", 2 * T) - T
    if room < 0:
        raise UserError(f"ERROR: blocks of {T} tokens: the generator reads {room + T} at most")
    # all rows of a batch write as many tokens: its crossovers are similar
    for row in crossovers.argsort().tolist():
        if (
            batches
            and len(batches[-1]) < 2 * ROWS
            and crossovers[row] - crossovers[batches[-1][0]] <= room
        ):
            batches[-1].append(row)
        else:
            batches.append([row])
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    kept, model.generation_config = (
        model.generation_config,
        load_transformers().GenerationConfig(**plain),
    )
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            for rows in counted(batches, len(batches), "Crossover samples"):
                shortest, longest = int(crossovers[rows[0]]), int(crossovers[rows[-1]])
                # (b, longest), < 0: padding
                places = torch.arange(longest) - (longest - crossovers[rows, None])
                given = natural[rows].gather(1, places.clamp(min=0)).to(device)
                mask = (places >= 0).long().to(device)
                written = model.generate(
                    input_ids=given, attention_mask=mask, max_new_tokens=T - shortest
                )
                written = written[:, longest:].cpu()
                for row, new in zip(rows, written, strict=True):
                    ids[row, crossovers[row] :] = new[: T - crossovers[row]]
    finally:
        model.generation_config = kept
    return ids


def load_model(name: str, bits: int | None = None, dtype: Any = "auto") -> Any:
    """A causal model of transformers from a folder or the hub, on this process's device; nothing in
    it is executed."""
    device = import_optional("accelerate").PartialState().device
    transformers, options = (
        load_transformers(),
        {"trust_remote_code": False, "use_safetensors": True, "dtype": dtype},
    )
    if bits is not None:
        quantization = transformers.BitsAndBytesConfig(
            load_in_4bit=bits == 4, load_in_8bit=bits == 8
        )
        options |= {"quantization_config": quantization, "device_map": {"": device}}
    model = loaded(transformers.AutoModelForCausalLM, name, **options)
    return model if bits else model.to(device)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder or a name of the hub, with the special tokens that TRL demands."""
    tokenizer = loaded(load_transformers().AutoTokenizer, name, trust_remote_code=False)
    # an id beyond the model's, which is never written; padding is masked
    if tokenizer.eos_token is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.padding_side = "left"
    return tokenizer


def loaded(kind: Any, name: str, **options: Any) -> Any:
    """What `kind.from_pretrained` reads; UserError, in one line, where it cannot."""
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:  # damaged files can make the reader stumble in any way
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"ERROR: {name} cannot be read: {reason:.300}") from None
