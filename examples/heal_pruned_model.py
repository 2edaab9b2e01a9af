"""Heal a pruned language model with the whole model as its teacher.

    python -m examples.heal_pruned_model --whole smollm2/ --gguf_file
    SmolLM2-135M-Instruct.Q4_1.gguf --arm crossover

It needs no labels, and none of the text that the whole model was trained on. First it drops some
layers of a Hugging Face model of Llama's architecture and trains the rest for some supervised
steps: this is the floor. From there it trains in one of five ways, the arms:
- supervised: more supervised steps
- crossover: CrossoverTrainer, with credit for each token
- sequence: the same reward as one number per sequence, in TRL's GRPOTrainer
- distillation: TRL's DistillationTrainer, with the probabilities of all tokens
- constant: GRPOTrainer with a constant reward, to measure its seconds
Each arm adds its figures to results.json in out_dir. The text is English paragraphs from the
descriptions of the installed packages, or --text.
"""

import resource
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from common.files import read_json, write_json
from common.log import counted, print0
from common.process import UserError, run_main
from common.settings import Errors, Settings, differing_settings, parse_settings, setting
from corpus.encode import find_texts
from data_loader import read_text
from interop.crossover_reward import CrossoverReward, complete, load_model, load_tokenizer, loaded
from metrics.bootstrap import bootstrap_mean, format_figure
from reports.figures import write_png

try:
    import transformers
    from datasets import Dataset
    from trl import (
        DistillationConfig,
        DistillationTrainer,
        GRPOConfig,
        GRPOTrainer,
        SFTConfig,
        SFTTrainer,
    )

    from interop.crossover_trainer import CrossoverTrainer
except ImportError as missing:
    print(
        f"ERROR: this needs {missing.name}: pip install -r requirements-interop.txt",
        file=sys.stderr,
    )
    sys.exit(2)

ROWS = 8  # sequences that are read at a time
SHOWN = 3  # completions in the picture
TEMPERATURES = torch.linspace(0.8, 2.0, 13)
PROMPT = 32  # tokens
COMPLETION = 32  # tokens
GROUP = 4  # completions of a prompt
LENGTH = PROMPT + COMPLETION


@dataclass
class HealSettings(Settings):
    """Drop layers of a model, and train the rest toward the whole model."""

    whole: str = "smollm2"
    """folder of the whole model, safetensors or, with gguf_file, GGUF"""
    gguf_file: str | None = None
    """name of the GGUF file in that folder (needs the package gguf)"""
    arm: Literal["supervised", "crossover", "sequence", "distillation", "constant"] = "crossover"
    """how training continues from the floor"""
    text: tuple[str, ...] = ()
    """UTF-8 text files; none: the descriptions of the installed packages"""
    out_dir: str = "out/heal"
    """models, figures (results.json) and pictures"""
    drop: tuple[int, ...] = (6, 12, 18, 24)
    """numbers of the layers to drop, from 0"""
    floor_steps: int = setting(30, minimum=1)
    """steps of supervised training before every arm"""
    steps: int = setting(20, minimum=1)
    """steps of the arm"""
    num_blocks: int = setting(128, minimum=16)
    """held-out blocks: half to fit weight and temperature, half to report on"""
    learning_rate: float = setting(2e-5, above=0)
    """peak rate of AdamW for the floor, with linear decay; the arms use half of it"""
    weight: float | None = setting(0.99, above=0, below=1)
    """weight of the whole model in the mixture that is the target; None: the fitted weight"""
    prompts: int = setting(8, minimum=1)
    """prompts of a step, with 4 completions each; a supervised step reads as many sequences"""
    allow_unpredictive: bool = False
    """continue if the interval of the reward's R2 includes 0"""
    seed: int = setting(42, minimum=0)
    """seed of all random numbers"""

    def check_settings(self, errors: Errors) -> None:
        """Check that the completions fill batches."""
        errors.check(
            self.prompts % 2 == 0,
            f"prompts={self.prompts}: must be even, to fill batches of {ROWS}",
        )


def main() -> None:
    settings = parse_settings(HealSettings, "heal_pruned_model")
    out, free = Path(settings.out_dir), ("arm", "steps", "weight", "out_dir", "allow_unpredictive")
    own = {name: str(value) for name, value in asdict(settings).items() if name not in free}
    if (record := out / "settings.json").exists() and (
        difference := differing_settings(read_json(record), own)
    ):
        raise UserError(
            f"ERROR: {out} is of another experiment ({difference}): name another out_dir"
        )
    write_json(record, own)
    whole = make_whole(settings, out / "whole")
    if not (out / "pruned").exists():
        save(prune(whole, settings.drop), out, "pruned")
    tokenizer = load_tokenizer(str(out / "whole"))
    train, held_out = split_blocks(settings, tokenizer)
    if not (out / "floor").exists():
        floor = load_model(str(out / "pruned"), dtype=torch.float32)
        run(
            "supervised",
            floor,
            settings.floor_steps,
            settings.learning_rate,
            settings,
            whole,
            tokenizer,
            train,
        )
        save(floor, out, "floor")
    reward = CrossoverReward(whole, load_model(str(out / "floor")), tokenizer=tokenizer)
    skill = reward.fit(held_out[::2], settings.seed, settings.allow_unpredictive)
    reward.set_weight(settings.weight or skill["mixture"])
    policy, started = load_model(str(out / "floor"), dtype=torch.float32), time.perf_counter()
    run(
        settings.arm,
        policy,
        settings.steps,
        settings.learning_rate / 2,
        settings,
        whole,
        tokenizer,
        train,
        reward,
    )
    cost = {
        "seconds": time.perf_counter() - started,
        "steps": settings.steps,
        "peak_gib": peak_memory(),
    }
    reward.set_weight(skill["mixture"])
    save(policy, out, settings.arm)

    path = out / "results.json"
    results = read_json(path) if path.exists() else {}
    for name, model in {
        "pruned": None,
        "floor": None,
        "whole": whole,
        settings.arm: policy,
    }.items():
        if name not in results or model is policy:
            model = model or load_model(str(out / name))
            results[name] = measure(
                model, whole, reward, held_out, settings.seed, out / f"{name}.png"
            )
    results[settings.arm] |= cost
    for name in ("kl", "calibrated_nll"):
        own, start = (
            torch.tensor(results[each]["by_block"][name]) for each in (settings.arm, "floor")
        )
        results[settings.arm] |= bootstrap_mean(f"{name}_minus_floor", own - start, settings.seed)
    results["reward"] = {name: skill[name] for name in ("mixture", "r2", "r2_low", "r2_high")}
    write_json(path, results)
    print_table(results)


def make_whole(settings: HealSettings, folder: Path) -> Any:
    """Return the whole model in float32.

    Weights of a GGUF file are copied into a new model, because the loaded one cannot be saved.
    """
    if not folder.exists():
        options = {"gguf_file": settings.gguf_file, "trust_remote_code": False}
        only = {"dtype": torch.float32, "use_safetensors": None if settings.gguf_file else True}
        read = loaded(transformers.AutoModelForCausalLM, settings.whole, **options, **only)
        config = {
            name: value
            for name, value in read.config.to_dict().items()
            if name != "quantization_config"
        }
        model = transformers.AutoModelForCausalLM.from_config(
            type(read.config)(**config), dtype=torch.float32
        )
        model.load_state_dict(read.state_dict())
        loaded(transformers.AutoTokenizer, settings.whole, **options).save_pretrained(
            folder.with_name("tokenizer")
        )
        save(model, folder.parent, folder.name)
    return load_model(str(folder), dtype=torch.float32).requires_grad_(False)


def save(model: Any, out: Path, name: str) -> None:
    """Write a model with the tokenizer to out/name, and replace what is there."""
    partial = out / f".{name}.partial"
    model.save_pretrained(partial)
    load_tokenizer(str(out / "tokenizer")).save_pretrained(partial)
    shutil.rmtree(out / name, ignore_errors=True)
    partial.rename(out / name)


def prune(whole: Any, drop: tuple[int, ...]) -> Any:
    """Return a copy of the whole model without some of its layers."""
    config, count = whole.config.to_dict(), whole.config.num_hidden_layers
    if not set(drop) < set(range(count)):
        raise UserError(
            f"ERROR: drop={drop}: must be some, not all, of the layers 0 to {count - 1}"
        )
    kept = [layer for layer in range(count) if layer not in drop]
    config |= {"num_hidden_layers": len(kept), "layer_types": None}
    pruned = transformers.AutoModelForCausalLM.from_config(
        type(whole.config)(**config), dtype=torch.float32
    )
    state = whole.state_dict()
    for name, target in pruned.state_dict().items():
        first, found, rest = name.partition(".layers.")
        number, _, end = rest.partition(".")
        target.copy_(state[f"{first}.layers.{kept[int(number)]}.{end}" if found else name])
    return pruned


def paragraphs() -> list[str]:
    """Return English paragraphs, without code, of the installed packages' descriptions."""
    found = set()
    for package in distributions():
        for part in str(
            package.metadata.get_payload() or package.metadata.get("Description", "")
        ).split("\n\n"):
            words, text = part.split(), " ".join(part.split())
            plain = sum(word.strip(".,;:()'\"`*[]").isalpha() for word in words)
            if (
                len(words) >= 20
                and plain > 0.8 * len(words)
                and text.isascii()
                and not set(text) & set("|<>=#")
            ):
                found.add(text)
    return sorted(found)


def split_blocks(settings: HealSettings, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return blocks (n, LENGTH) int64 to train on, and held-out blocks of other paragraphs."""
    texts = (
        [read_text(path) for path in find_texts(settings.text).values()]
        if settings.text
        else paragraphs()
    )
    order = torch.randperm(
        len(texts), generator=torch.Generator().manual_seed(settings.seed)
    ).tolist()
    ids = [
        token
        for number in order
        for token in [*tokenizer(text=texts[number])["input_ids"], tokenizer.eos_token_id]
    ]
    count, least = len(ids) // LENGTH, 2 * settings.num_blocks
    if count < least:
        raise UserError(
            f"ERROR: {count} blocks of {LENGTH} tokens: {least} at least are needed, add --text"
        )
    print0(
        f"{len(texts)} texts, {count - settings.num_blocks} blocks of {LENGTH} tokens to train on"
    )
    blocks = torch.tensor(ids[: count * LENGTH]).view(count, LENGTH)
    return blocks[: -settings.num_blocks], blocks[-settings.num_blocks :]


def run(
    arm: str,
    model: Any,
    steps: int,
    learning_rate: float,
    settings: HealSettings,
    whole: Any,
    tokenizer: Any,
    blocks: Tensor,
    reward: CrossoverReward | None = None,
) -> None:
    """Train all weights of a model except the embeddings, in the way of one arm.

    A step has prompts * GROUP sequences.
    """
    model.get_input_embeddings().requires_grad_(False)
    common: dict[str, Any] = {
        "max_steps": steps,
        "learning_rate": learning_rate,
        "seed": settings.seed,
    }
    common |= {
        "per_device_train_batch_size": ROWS,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
    }
    common |= {"gradient_accumulation_steps": settings.prompts * GROUP // ROWS}
    common |= {"bf16": model.device.type == "cuda", "use_cpu": model.device.type == "cpu"}
    out, prompts = (
        str(Path(settings.out_dir, ".trainer")),
        tokenizer.batch_decode(blocks[:, :PROMPT].tolist()),
    )
    data = {"input_ids": blocks.tolist()} if arm == "supervised" else {"prompt": prompts}
    shared = {"train_dataset": Dataset.from_dict(data), "processing_class": tokenizer}
    common |= (
        {}
        if arm == "supervised"
        else {"max_completion_length": COMPLETION, "disable_dropout": True}
    )
    if arm == "supervised":
        trainer = SFTTrainer(model, args=SFTConfig(out, max_length=None, **common), **shared)
    elif arm == "distillation":
        trainer = DistillationTrainer(model, whole, DistillationConfig(out, **common), **shared)
    else:
        assert reward is not None
        reward.max_completion_length = COMPLETION
        kind, function = CrossoverTrainer if arm == "crossover" else GRPOTrainer, reward
        if arm == "constant":
            function = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
        trainer = kind(
            model, function, args=GRPOConfig(out, num_generations=GROUP, **common), **shared
        )
    trainer.train()


@torch.no_grad()
def measure(
    model: Any, whole: Any, reward: CrossoverReward, held_out: Tensor, seed: int, picture: Path
) -> dict[str, Any]:
    """Return figures of a model on held-out blocks and on its completions of their prompts.

    nll: nats per token. calibrated_nll: the same at the temperature that is best on the other half.
    kl: KL to the whole model over the vocabulary, at the tokens of the completions, in nats per
    token. natural: P(natural) of the completions. Intervals are over blocks.
    """
    model, fitted, report = model.eval(), held_out[::2], held_out[1::2]
    best = float(TEMPERATURES[block_losses(model, fitted, TEMPERATURES).mean(1).argmin()])
    raw, calibrated = block_losses(model, report, torch.tensor([1.0, best]))
    written = complete(model, report, torch.full((len(report),), PROMPT), seed)
    kl = [
        block_kl(model, whole, part)
        for part in counted(written.split(ROWS), -(-len(written) // ROWS), "KL")
    ]
    natural = reward.token_probabilities(written.tolist()).cpu()
    means = natural[:, PROMPT:].mean(1)
    by_block = {"nll": raw, "calibrated_nll": calibrated, "kl": torch.cat(kl), "natural": means}
    figures = {
        "temperature": best,
        "by_block": {name: values.tolist() for name, values in by_block.items()},
    }
    for name, values in by_block.items():
        figures |= bootstrap_mean(name, values, seed)
    draw(picture, reward.tokenizer, written[:SHOWN], natural[:SHOWN])
    return figures


def block_losses(model: Any, blocks: Tensor, temperatures: Tensor) -> Tensor:
    """Return mean losses (t, n) in nats per token of blocks (n, T) at t temperatures."""
    parts = []
    for part in blocks.to(model.device).split(ROWS):
        logits = model(input_ids=part).logits[:, :-1].float()  # (b, T - 1, V)
        right = logits.gather(2, part[:, 1:, None])[..., 0]
        losses = [((logits / t).logsumexp(2) - right / t).mean(1) for t in temperatures.tolist()]
        parts.append(torch.stack(losses).cpu())
    return torch.cat(parts, 1)


def block_kl(model: Any, whole: Any, ids: Tensor) -> Tensor:
    """Return KL(model || whole) (n,) in nats per token at the completions in ids (n, T)."""
    ids = ids.to(model.device)
    own, other = (
        each(input_ids=ids).logits[:, PROMPT - 1 : -1].float().log_softmax(-1)
        for each in (model, whole)
    )
    return (own.exp() * (own - other)).sum(-1).mean(1).cpu()


def draw(path: Path, tokenizer: Any, rows: Tensor, natural: Tensor) -> None:
    """Draw prompts (grey) and completions, whose tokens are coloured by P(natural).

    Red is generated, green is natural.
    """
    figure, axes = plt.subplots(len(rows), figsize=(11, 1.5 * len(rows)))
    for axis, row, shares in zip(axes, rows.tolist(), natural.tolist(), strict=True):
        axis.set_axis_off()
        x, y = 0, 0
        for number, (token, share) in enumerate(zip(row, shares, strict=True)):
            text = tokenizer.decode([token]).replace("\n", " ").replace("$", r"\$")
            if x + len(text) > 110:
                x, y = 0, y + 1
            colour = "lightgrey" if number < PROMPT else plt.cm.RdYlGn(share)
            box = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
            axis.text(
                x / 110, 1 - y / 4.5, text, family="monospace", fontsize=9, va="top", bbox=box
            )
            x += len(text)
    write_png(figure, path)


def peak_memory() -> float:
    """Return the peak memory of this process in GiB: the GPU's if there is one, else the CPU's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def print_table(results: dict[str, Any]) -> None:
    """Print a line of figures for each arm so far. Differences to the floor are paired by block."""
    names = {
        "kl": "KL to the whole",
        "nll": "NLL",
        "calibrated_nll": "calibrated NLL",
        "natural": "P(natural)",
    }
    names |= {
        "kl_minus_floor": "KL - floor's",
        "calibrated_nll_minus_floor": "calibrated NLL - floor's",
    }
    print0(f"\n{'model':14}" + "".join(f"{name:26}" for name in names.values()) + "seconds")
    for arm, figures in results.items():
        if "kl" in figures:
            shown = [
                format_figure(figures, name, ".3f") if name in figures else "" for name in names
            ]
            seconds = f"{figures['seconds']:.0f}" if "seconds" in figures else ""
            print0(f"{arm:14}" + "".join(f"{text:26}" for text in shown) + seconds)


if __name__ == "__main__":
    run_main(main)
