"""How near reward models come to the best possible: text of a known model p, and a generator q that learned from it.

    python benchmarks/oracle.py

Where p and q are both known, so is the exact posterior over the crossover, and with it the R2 that nothing can exceed
in expectation: its mean makes the least squared error there is. Every head's regret is measured against it, on the same
unseen sequences. "Natural" text is a stream in which p writes every token after looking at the last few. Those before a
sequence the posterior knows and a head does not: it is a bound.
"""

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.reward_models import Pipeline, check_names, markdown, skill_cells
from common.device import random_stream
from common.files import atomic_path
from common.log import counted, say
from common.process import run_main
from common.settings import Problems, Settings, parse_settings, setting
from data_loader import dataset_folder, evenly_spaced, open_token_file
from generation.sampling import Sampling, sample_tokens
from losses import token_log_probs
from model import GPT
from reports.figures import write_png
from reward.posterior import natural_share
from reward.skill import measure_skill
from reward_dataset_loader import RewardDataset, rows_by_part
from training.checkpoint import build_model, load_checkpoint

OPTIMIZER = {"optimizer": "muon", "learning_rate": 6e-3}
TOKENS_A_STEP = 2048
LARGE = "likelihood, a larger natural model"
HEADS: dict[str, dict[str, Any]] = {
    "last, frozen (the seeds')": {"head": "last"},
    "position, frozen": {"head": "position", "max_epochs": 3},
    "position, all unfrozen": {"head": "position", "unfreeze_layers": -1, "learning_rate": 3e-4, "max_epochs": 2},
    "likelihood (the default)": {"natural_iters": 400},
    "likelihood, 1,600 steps": {"natural_iters": 1600},
    LARGE: {"natural_model_path": "large.pt"},
}
BLOCKS_A_STREAM = 64
ROWS_AT_A_TIME, WINDOWS_AT_A_TIME = 64, 8192


@dataclass
class OracleSettings(Settings):
    """Every head against the exact posterior."""

    dataset: str = "shakespeare_char"
    """corpus that p is trained on: a path, or a name below data/"""
    block_size: int = setting(128, minimum=1)
    """tokens in a sequence"""
    num_tokens: int = 3_000_000
    """tokens of text that p writes"""
    p_order: int = setting(3, minimum=1)
    """tokens that p looks back"""
    p_size: tuple[int, int] = (2, 64)
    """layers and width of p"""
    p_iters: int = setting(100, minimum=1)
    """steps of p"""
    q_size: tuple[int, int] = (2, 48)
    """layers and width of q"""
    q_iters: int = setting(200, minimum=1)
    """steps of q, on p's text"""
    large_size: tuple[int, int] = (3, 96)
    """layers and width of the larger natural model"""
    large_iters: int = setting(1500, minimum=1)
    """steps of the larger natural model, on p's text"""
    max_blocks: int = setting(1000, minimum=1)
    """blocks of each split that q completes, 4 times each"""
    heads: tuple[str, ...] = tuple(HEADS)
    """names of HEADS"""
    out_dir: str = "out/benchmarks/oracle"
    """where everything is made, the picture too (oracle.png)"""
    seed: int = setting(42, minimum=0)
    """seed of p's text, the reward data and the reward models"""

    def check_further(self, problems: Problems) -> None:
        """Note a text that is too short, that p looks back farther than a block, and names that are none."""
        check_names(problems, "heads", self.heads, HEADS)
        problems.require(
            self.num_tokens >= 400 * self.block_size,
            f"num_tokens={self.num_tokens}: fewer than 400 blocks of {self.block_size}",
            "Give more",
        )
        problems.require(
            self.p_order <= self.block_size,
            f"p_order={self.p_order}: must be <= block_size={self.block_size}",
            "Give a smaller --p_order",
        )


def main() -> None:
    settings = parse_settings(OracleSettings, "oracle")
    pipeline, N = Pipeline(settings.out_dir), settings.block_size

    source = dataset_folder(settings.dataset).resolve()
    p_path = pipeline.generator("p", source, settings.p_iters, **recipe(settings.p_size, settings.p_order))
    p = build_model(load_checkpoint(p_path), "generator", p_path)
    corpus = pipeline.out / f"corpus_{settings.num_tokens}_{N}_{settings.seed}"
    if not (corpus / "val.bin").is_file():
        write_text_of(p, source, corpus, settings)
    q_path = pipeline.generator("q", corpus, settings.q_iters, **recipe(settings.q_size, N))
    q = build_model(load_checkpoint(q_path), "generator", q_path)
    if LARGE in settings.heads:
        pipeline.generator("large", corpus, settings.large_iters, **recipe(settings.large_size, N))
    amount = {"samples_per_chunk": 4, "max_blocks": settings.max_blocks, "seed": settings.seed}
    data = pipeline.reward_data("data", q_path, corpus, **amount)

    best, divergence = exact_skill(p, q, data, corpus)
    rows, skills = [["the exact posterior", *skill_cells(best), "100%", "0"]], {}
    for name in settings.heads:
        options = {**HEADS[name], "seed": settings.seed}
        if "natural_model_path" in options:
            options["natural_model_path"] = pipeline.out / options["natural_model_path"]
        file_name = "reward_model_" + "_".join(word for word in name.replace(",", "").split() if word.isalnum())
        skill = pipeline.reward_model(file_name, q_path, data, corpus, **options)
        skills[name] = skill
        rows.append([name, *skill_cells(skill), f"{skill['r2'] / best['r2']:.0%}", f"{best['r2'] - skill['r2']:.3f}"])
    say(f"\nPer-token divergence of q from p on p's text: {divergence:.4f} nats; N = {N}")
    header = ["reward model", "R² (95%)", "MAE, tokens", "AUC", "seconds", "share of the best R²", "regret"]
    say("\n" + markdown(header, rows))
    draw(best, skills, f"N = {N}, divergence {divergence:.3f} nats a token", pipeline.out / "oracle.png")
    say(f"\nSaved {pipeline.out / 'oracle.png'}")


def recipe(size: tuple[int, int], block_size: int) -> dict[str, Any]:
    """Options of train.py for a model of so many layers and channels, at most 32 of them a head."""
    n_layer, n_embd = size
    shape = {"n_layer": n_layer, "n_head": -(-n_embd // 32), "n_embd": n_embd, "block_size": block_size}
    return {**shape, "batch_size": max(1, TOKENS_A_STEP // block_size), **OPTIMIZER}


@torch.no_grad()
def write_text_of(p: GPT, source: Path, corpus: Path, settings: OracleSettings) -> None:
    """A corpus (train.bin, val.bin, meta.pkl) of p's text: long streams, one behind the other.

    Each stream goes on from some tokens of p's own corpus, which are left out; for the validation split's they lie in
    before.npy, (streams, order).
    """
    order, length = p.config.block_size, BLOCKS_A_STREAM * settings.block_size
    num_streams = settings.num_tokens // length
    natural = open_token_file(source / "train.bin", "train", p.config.num_real_tokens)
    stream = random_stream(settings.seed, "oracle")
    firsts = stream.integers(len(natural) - order, size=(num_streams, 1))
    window = torch.from_numpy(natural[firsts + np.arange(order)].astype(np.int64))  # (num_streams, order)
    boundary = num_streams * 9 // 10  # whole streams in either split
    corpus.mkdir(parents=True, exist_ok=True)
    np.save(corpus / "before.npy", window[boundary:].numpy())
    text = torch.empty(num_streams, length, dtype=torch.int64)
    for position in counted(range(length), length, "Text of p"):
        uniforms = torch.from_numpy(stream.random(num_streams, dtype=np.float32))
        text[:, position], _, _ = sample_tokens(p(window)[0][:, -1], uniforms, Sampling())
        window = torch.cat((window[:, 1:], text[:, position : position + 1]), 1)
    if (source / "meta.pkl").is_file():
        with atomic_path(corpus / "meta.pkl") as partial:
            shutil.copyfile(source / "meta.pkl", partial)
    for name, part in (("train", text[:boundary]), ("val", text[boundary:])):
        with atomic_path(corpus / f"{name}.bin") as partial:
            part.flatten().numpy().astype(np.uint16).tofile(partial)


def exact_skill(p: GPT, q: GPT, data: Path, corpus: Path) -> tuple[dict[str, Any], float]:
    """Skill of the exact posterior's mean on the reporting half, and the mean of log p - log q over its natural blocks.

    The latter without a block's first `order` tokens, of which q reads less than p.
    """
    dataset, order = RewardDataset(data, "val"), p.config.block_size
    _, rows, _ = rows_by_part(dataset)
    per_block, N = dataset.samples_per_chunk or 1, dataset.block_size
    natural = open_token_file(corpus / "val.bin", "val", p.config.num_real_tokens)
    numbers = np.unique(rows // per_block)
    blocks = evenly_spaced(numbers, len(natural) // N, len(dataset) // per_block)
    before = tokens_before(corpus, natural, blocks, N)  # (blocks, order)
    x = np.concatenate((before[rows // per_block - numbers[0]], dataset.x[rows]), 1)  # (n, order + N)
    prediction, truth = natural_share(F.pad(log_ratios(p, q, x), (1, 0))), torch.from_numpy(dataset.y[rows, 0])
    text = natural[blocks[:, None] * N + np.arange(N)]  # (blocks, N)
    divergence = log_ratios(p, q, np.concatenate((before, text), 1))[:, order - 1 :].double().mean().item()
    return measure_skill(prediction, truth, torch.from_numpy(rows // per_block), N, seed=42), divergence


def tokens_before(corpus: Path, natural: np.ndarray, blocks: np.ndarray, block_size: int) -> np.ndarray:
    """The context (n, order) of p at the first tokens of the validation split's blocks."""
    begun_with = np.load(corpus / "before.npy")  # (streams, order)
    order = begun_with.shape[1]
    before = natural[blocks[:, None] * block_size + np.arange(-order, 0)]
    streams, place = np.divmod(blocks, BLOCKS_A_STREAM)
    before[place == 0] = begun_with[streams[place == 0]]
    return before


@torch.no_grad()
def log_ratios(p: GPT, q: GPT, x: np.ndarray) -> Tensor:
    """log p - log q (n, N - 1) of all tokens but the first of N, from x (n, order + N): p knows what is before them."""
    order, parts = p.config.block_size, []
    for ids in torch.from_numpy(x.astype(np.int64)).split(ROWS_AT_A_TIME):
        block = ids[:, order:]
        windows = ids.unfold(1, order, 1)[:, 1:-1]  # (rows, N - 1, order): what is before each of them
        logits = torch.cat([p(part)[0][:, 0] for part in windows.flatten(0, 1).split(WINDOWS_AT_A_TIME)])
        natural = token_log_probs(logits.view(*windows.shape[:2], -1), block[:, 1:])
        parts.append(natural - token_log_probs(q.logits(q.trunk(block[:, :-1])), block[:, 1:]))
    return torch.cat(parts)


def draw(best: dict[str, Any], skills: dict[str, Any], title: str, path: Path) -> None:
    """A picture of every head's R2 against the best possible."""
    from matplotlib.figure import Figure

    names = list(skills)[::-1]
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.barh(names, [skills[name]["r2"] for name in names], color="tab:blue")
    for name in names:
        if skills[name]["r2_low"] is not None:
            axes.plot([skills[name]["r2_low"], skills[name]["r2_high"]], [name, name], color="0.3", marker="|")
    axes.axvline(best["r2"], color="tab:red", label=f"the exact posterior, {best['r2']:.3f}")
    if best["r2_low"] is not None:
        axes.axvspan(best["r2_low"], best["r2_high"], color="tab:red", alpha=0.15)
    axes.axvline(0, color="0.5", linewidth=1)
    axes.set(xlabel="R² on unseen text, 95% intervals", title=title)
    axes.legend(loc="center left")
    write_png(figure, path)


if __name__ == "__main__":
    run_main(main)
