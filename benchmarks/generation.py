"""Measure how many tokens per second are generated, compared with other implementations.

    python benchmarks/generation.py --num_runs 3

"The seeds" are the documents that the project started from. Their generation, one sequence at a
time without a cache, is the reference of all ratios; their headline job took 150 s on their GPU.
Models are untrained and natural text is random, because speed does not depend on either. Ways
alternate, and figures are medians. Hugging Face's `generate` is included if transformers is
installed (requirements-bench.txt).
"""

import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from common.device import select_device, select_dtype
from common.log import print0
from common.process import run_main
from common.settings import Errors, Settings, parse_settings, setting
from generation.completions import Completer
from generation.sampling import Sampling
from model import GPT, GPTConfig

SHAPES: dict[str, dict[str, int]] = {
    "XS": {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        "block_size": 16,
    },  # to try the script
    "S": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64},
    "M": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256},
}
VOCAB_SIZE = 65
GROUP = 16  # samples of each block
FEW_ROWS = 128  # rows of a train_grpo.py step, in groups of FEW_GROUP; data take about 1,000
FEW_GROUP = 8
HEADLINE_SHAPE = SHAPES["M"] | {"block_size": 1024}
HEADLINE_BLOCKS, HEADLINE_GROUP, HEADLINE_SECONDS = 878 + 97, 20, 150
# Goals: times the seeds' rate, times Hugging Face's best, percent of the product rate.
GOALS = {"S": (80, 5, 30), "M": (130, 4, 45)}


@dataclass
class GenerationSettings(Settings):
    """Compare our generation with others."""

    num_runs: int = setting(3, minimum=1)
    """timed runs of each way, after a warm-up"""
    shapes: tuple[Literal["XS", "S", "M"], ...] = ("S", "M")
    """XS (2 layers, 2 heads, width 32, block size 16), S (4, 4, 128, 64), M (6, 6, 384, 256)"""
    headline_blocks: int = setting(2, minimum=0, maximum=HEADLINE_BLOCKS)
    """blocks of the headline job to generate; 0: leave the job out; 975: all of it"""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps"""
    hf_batches: tuple[int, ...] = (64, 128, 256, 512)
    """batch sizes for Hugging Face; the fastest in one run of each gets a row of its own"""
    num_processes: int | None = setting(None, minimum=1)
    """processes of one thread in the row with several processes; None: one per core; 1: leave
    that row out"""

    def check_settings(self, errors: Errors) -> None:
        """Check that there are shapes, and possible batch sizes."""
        errors.check(
            bool(self.shapes), "shapes: none is named", f"Name some of {', '.join(SHAPES)}"
        )
        possible = bool(self.hf_batches) and min(self.hf_batches) > 0
        errors.check(
            possible,
            f"hf_batches={self.hf_batches}: must be one or more numbers >= 1",
            "Use 64 128 256 512",
        )


def make_model(shape: dict[str, int], device: torch.device) -> GPT:
    """Return an untrained model of a shape."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=VOCAB_SIZE, bias=False, **shape)).eval()
    return model.to(device, select_dtype("auto", device))


def make_job(model: GPT, blocks: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return natural text (P, N), crossovers (P, G), uniforms (P, G, N), the same in each call."""
    N, draw = model.config.block_size, torch.Generator().manual_seed(1)
    natural = torch.randint(VOCAB_SIZE, (blocks, N), generator=draw)
    crossovers = torch.randint(1, N, (blocks, group), generator=draw)
    device = next(model.parameters()).device
    return natural.to(device), crossovers, torch.rand(blocks, group, N, generator=draw)


# -------------------------------------------------------------------------------------------------
# the ways; each generates text and returns the number of generated tokens


@torch.no_grad()
def whole_prefix_again(model: GPT, idx: Tensor) -> int:
    """Fill the block of every row of idx (B, T); compute the whole prefix for every token."""
    rows, start = idx.shape
    while idx.size(1) < model.config.block_size:
        logits, _ = model(idx)
        drawn = torch.multinomial(logits[:, -1].float().softmax(-1), 1)
        idx = torch.cat((idx, drawn), dim=1)
    return rows * (idx.size(1) - start)


def seeds_way(model: GPT, sequences: int) -> Callable[[], int]:
    """Generate one sequence at a time."""
    natural, crossovers, _ = make_job(model, 1, sequences)
    prompts = [natural[:, : int(k)] for k in crossovers[0]]
    return lambda: sum(whole_prefix_again(model, prompt) for prompt in prompts)


def batched_way(model: GPT, rows: int) -> Callable[[], int]:
    """Generate as nanoGPT does, which needs prompts of equal length: here one token."""
    natural, _, _ = make_job(model, rows, 1)
    return lambda: whole_prefix_again(model, natural[:, :1])


def hugging_face_way(model: GPT, rows: int) -> Callable[[], int] | None:
    """Generate with Hugging Face's `generate` and its cache, from prompts of one token.

    Return None if transformers is not installed. The model is a GPT-2 of the same shape.
    """
    try:
        from transformers import GPT2Config, GPT2LMHeadModel, logging
    except ImportError:
        return None
    logging.set_verbosity_error()
    c = model.config
    config = GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.block_size,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_embd=c.n_embd,
        bos_token_id=None,
        eos_token_id=None,
    )
    parameter = next(model.parameters())
    gpt2 = GPT2LMHeadModel(config).eval().to(parameter.device, parameter.dtype)
    natural, _, _ = make_job(model, rows, 1)
    new_tokens = c.block_size - 1

    @torch.no_grad()
    def way() -> int:
        written = gpt2.generate(
            natural[:, :1], max_new_tokens=new_tokens, do_sample=True, top_k=0, pad_token_id=0
        )
        return written[:, 1:].numel()

    return way


def best_batch(model: GPT, batches: tuple[int, ...]) -> int:
    """Return the batch size with which Hugging Face generates most tokens per second."""
    rates = {}
    for batch in batches if len(batches) > 1 else ():
        way = hugging_face_way(model, batch)
        if way is not None:
            rates[batch] = rate(way)
    return max(rates, key=rates.__getitem__, default=batches[0])


def engine_way(
    model: GPT, group: int = GROUP, blocks: int | None = None, of_a_token: bool = False
) -> Callable[[], int]:
    """Generate with Completer, by default as many blocks at a time as it chooses.

    of_a_token: prompts have one token, as for Hugging Face.
    """
    completer = Completer(model, model.config.block_size)
    natural, crossovers, uniforms = make_job(
        model, blocks or max(1, completer.rows // group), group
    )
    crossovers = torch.ones_like(crossovers) if of_a_token else crossovers

    def way() -> int:
        completer(natural, crossovers, uniforms, Sampling())
        return int((model.config.block_size - crossovers).sum())

    return way


WORKER: dict[str, Callable[[], int]] = {}  # the ways of this process of the pool


def engine_in_a_worker(name: str) -> int:
    """Generate with Completer in a process that has one thread."""
    torch.set_num_threads(1)
    if name not in WORKER:
        WORKER[name] = engine_way(make_model(SHAPES[name], torch.device("cpu")))
    return WORKER[name]()


# -------------------------------------------------------------------------------------------------
# the measurements


def rate(way: Callable[[], int]) -> float:
    """Return tokens per second."""
    synchronise()
    start = time.perf_counter()
    tokens = way()
    synchronise()
    return tokens / (time.perf_counter() - start)


def synchronise() -> None:
    """Wait until the GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


def product_rate(device: torch.device, repetitions: int = 30) -> float:
    """Return the floating-point operations per second of large square matrix products."""
    size = 1024 if device.type == "cpu" else 8192
    a, b = (
        torch.randn(size, size, device=device, dtype=select_dtype("auto", device)) for _ in range(2)
    )
    for _ in range(3):
        a @ b
    synchronise()
    start = time.perf_counter()
    for _ in range(repetitions):
        a @ b
    synchronise()
    return 2 * size**3 * repetitions / (time.perf_counter() - start)


def measure(name: str, settings: GenerationSettings, device: torch.device) -> None:
    """Measure one shape and print its table."""
    model = make_model(SHAPES[name], device)
    processes = (settings.num_processes or os.cpu_count()) if device.type == "cpu" else 1
    pool = multiprocessing.get_context("spawn").Pool(processes) if processes > 1 else None
    seeds, hugging_face = "one sequence, whole prefix again (the seeds)", "Hugging Face generate"
    rows = 4 if name == "M" else 64
    best = best_batch(model, settings.hf_batches)
    at_best, at_few = (
        f"{hugging_face}, its best batch, {best}",
        f"{hugging_face}, batch of {FEW_ROWS}",
    )
    engine, few = (
        f"engine, {Completer(model, model.config.block_size).rows:,} rows",
        f"engine, {FEW_ROWS} rows, prompts of a token too",
    )
    ways = {
        seeds: seeds_way(model, 2 if name == "M" else 8),
        f"batch of {rows}, whole prefix again (nanoGPT)": batched_way(model, rows),
        at_few: hugging_face_way(model, FEW_ROWS),
        at_best: hugging_face_way(model, best) if best != FEW_ROWS else None,
        few: engine_way(model, FEW_GROUP, FEW_ROWS // FEW_GROUP, of_a_token=True),
        engine: engine_way(model),
    }
    if pool is not None:
        ways[f"engine, {processes} processes of a thread"] = lambda: sum(
            pool.map(engine_in_a_worker, [name] * processes, chunksize=1)
        )
    ways = {title: way for title, way in ways.items() if way is not None}
    for title, way in ways.items():
        if title != seeds:
            way()  # the warm-up
    results: dict[str, list[float]] = {title: [] for title in ways}
    products = []
    for _ in range(settings.num_runs):
        for title, way in ways.items():
            results[title].append(rate(way))
        products.append(product_rate(device))
    if pool is not None:
        pool.terminate()

    c = model.config
    flops = 2 * (12 * c.n_layer * c.n_embd**2 + c.vocab_size * c.n_embd)
    bound = statistics.median(products) / flops
    medians = {title: statistics.median(values) for title, values in results.items()}
    print0(f"\n{name}: {c.n_layer} layers, {c.n_head} heads, {c.n_embd} wide, block {c.block_size}")
    print0(f"{'':<46} {'tokens/s':>10} {'x the seeds':>11} {'of products':>11}   all runs")
    for title, tokens in medians.items():
        runs = " ".join(f"{value:,.0f}" for value in results[title])
        print0(
            f"{title:<46} {tokens:>10,.0f} {tokens / medians[seeds]:>11.1f} "
            f"{tokens / bound:>10.0%}   {runs}"
        )
    title = f"every product at {statistics.median(products) / 1e9:,.0f} GFLOP/s"
    print0(f"{title:<46} {bound:>10,.0f} {bound / medians[seeds]:>11.1f} {1:>10.0%}")
    if name not in GOALS:
        return
    goals, rival = GOALS[name], "transformers is not installed"
    if at_few in medians:
        times = medians[engine] / medians.get(at_best, medians[at_few])
        rival = f"{times:.1f} times Hugging Face's best"
    print0(
        f"The engine: {medians[engine] / medians[seeds]:.0f} times the seeds' way (goal "
        f"{goals[0]}), {rival} "
        f"(goal {goals[1]}), {medians[engine] / bound:.0%} of the product rate (goal {goals[2]}%)"
    )
    if at_few in medians:
        print0(f"At {FEW_ROWS} rows each: {medians[few] / medians[at_few]:.1f} times Hugging Face")


def measure_headline(settings: GenerationSettings, device: torch.device) -> None:
    """Print the time of the seeds' headline job, extrapolated if only a part is generated."""
    model = make_model(HEADLINE_SHAPE, device)
    blocks, group = settings.headline_blocks, HEADLINE_GROUP
    engine_way(model, group, 1)()  # the warm-up
    tokens_per_second = rate(engine_way(model, group, blocks))
    # Extrapolate by tokens, because the few crossovers drawn here may be early or late. On average,
    # half of a block is generated.
    whole = HEADLINE_BLOCKS * group * model.config.block_size / 2 / tokens_per_second
    part = (
        "all of it"
        if blocks == HEADLINE_BLOCKS
        else f"{blocks} of its {HEADLINE_BLOCKS} blocks, extrapolated"
    )
    print0(
        f"\nThe headline job ({model.num_parameters() / 1e6:.2f}M parameters, block 1024, "
        f"19,500 samples): {part}"
    )
    print0(
        f"{tokens_per_second:,.0f} tokens/s; the whole takes {whole:,.0f} s (the seeds' "
        f"GPU: {HEADLINE_SECONDS} s)"
    )


def main() -> None:
    """Measure every shape and print the tables."""
    settings = parse_settings(GenerationSettings, "generation")
    device = select_device(settings.device)
    if device.type == "cuda":
        machine = torch.cuda.get_device_name(device)
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        machine = f"{platform.machine()}, {os.cpu_count()} cores, {capability}"
    print0(
        f"torch {torch.__version__}, {machine}; median of {settings.num_runs} interleaved "
        "runs after a warm-up"
    )
    print0(
        f"matrix products: {product_rate(device) / 1e9:,.0f} GFLOP/s in "
        f"{select_dtype('auto', device)}"
    )
    for name in settings.shapes:
        measure(name, settings, device)
    if settings.headline_blocks:
        measure_headline(settings, device)


if __name__ == "__main__":
    run_main(main)
