"""Measure the speed of the trainers, and compare train.py with nanoGPT's.

    python benchmarks/training.py --seeds 1337 1

Input: the corpus that data/shakespeare_char/prepare.py makes. Part `loss` trains with two recipes
of config/ at block size 64; the fast one takes --max_iters steps. Its seconds exclude evaluations,
and the last step's model is used. Part `nanogpt` runs nanoGPT's train.py (--nanogpt) and ours
alternately as processes; its seconds include start-up and evaluations. The other parts run in this
process and give medians after a warm-up. Compare figures of one run on one machine only.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from benchmarks.reward_models import ROOT, Pipeline, markdown, val_loss
from common.log import print0, read_records
from common.process import UserError, run_main
from common.settings import Errors, Settings, parse_settings, setting
from data_loader import WholeSplitBatches, dataset_folder, open_token_file
from losses import language_model_loss
from model import GPT, GPTConfig
from training.checkpoint import build_model, load_checkpoint
from training.optimizers import make_optimizers, take_step

NANOGPT_LOSS = 1.886  # at the end of its recipe, on the whole validation split
# Files of nanoGPT's repository, and the options that its README gives for a CPU.
NANOGPT_FILES = ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py")
NANOGPT_OPTIONS = {
    **{
        "device": "cpu",
        "compile": False,
        "eval_iters": 20,
        "log_interval": 1,
        "block_size": 64,
        "batch_size": 12,
    },
    **{
        "n_layer": 4,
        "n_head": 4,
        "n_embd": 128,
        "max_iters": 2000,
        "lr_decay_iters": 2000,
        "dropout": 0.0,
    },
}
SHAPES = {
    "S": {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64},
    "M": {"n_layer": 6, "n_head": 6, "n_embd": 384, "block_size": 256},
}


@dataclass
class TrainingBenchSettings(Settings):
    """Measure the speed of the trainers."""

    quick: bool = False
    """use few steps and samples, to see the form of the tables"""
    parts: tuple[Literal["loss", "nanogpt", "throughput", "start", "memory"], ...] = (
        *("loss", "nanogpt", "throughput", "start", "memory"),
    )
    """what to measure"""
    dataset: str = "shakespeare_char"
    """folder of the corpus of characters: a path, or a name in data/"""
    max_iters: int = setting(215, minimum=1)
    """steps of the fast recipe"""
    seeds: tuple[int, ...] = (1337, 1, 2)
    """seeds of the fast recipe, one row for each"""
    nanogpt: str | None = None
    """folder of nanoGPT's repository; a copy of its train.py is executed; None: leave this part
    out"""
    large_tokens: int = setting(500_000_000, minimum=10_000)
    """tokens of the corpus that memory is measured with; a token has two bytes"""
    num_runs: int = setting(5, minimum=1)
    """timed runs"""
    out_dir: str = "out/benchmarks/training"
    """folder of the models; models that exist are used again"""

    def check_settings(self, errors: Errors) -> None:
        """Check that the repository has the files that are copied."""
        for name in () if self.nanogpt is None else NANOGPT_FILES:
            is_there = Path(self.nanogpt or "", name).is_file()
            errors.check(
                is_there, f"nanogpt={self.nanogpt}: has no {name}", "Name a whole checkout"
            )


def main() -> None:
    settings = parse_settings(TrainingBenchSettings, "training")
    print0(
        f"{os.cpu_count()} processors, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    measure = {
        "loss": time_to_loss,
        "nanogpt": beside_nanogpt,
        "throughput": throughput,
        "start": start_up,
        "memory": memory,
    }
    for part in settings.parts:
        measure[part](settings)


def median_seconds(work: Callable[[], object], num_runs: int) -> float:
    """Return the median seconds of num_runs calls, after a warm-up call."""
    work()
    seconds = []
    for _ in range(num_runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


# -------------------------------------------------------------------------------------------------
# train.py


def time_to_loss(settings: TrainingBenchSettings) -> None:
    """Print the training seconds and losses of both recipes."""
    pipeline, corpus = Pipeline(settings.out_dir), dataset_folder(settings.dataset).resolve()
    nanogpt_iters, fast_iters = (20, 10) if settings.quick else (2000, settings.max_iters)
    runs = [("nanoGPT's", "nanogpt_cpu", nanogpt_iters, 1337)]
    runs += [
        ("the fast one", "shakespeare_complete_cpu", fast_iters, seed) for seed in settings.seeds
    ]
    rows, reference = [], None
    for title, config, iters, seed in runs:
        options = {"config": ROOT / "config" / f"{config}.py", "seed": seed, "block_size": 64}
        path = pipeline.generator(f"{config}_{iters}_{seed}", corpus, iters, **options)
        records = read_records(path.with_suffix(".jsonl"))
        tokens = 64 * {"nanogpt_cpu": 12, "shakespeare_complete_cpu": 16}[config]  # per step
        seconds = sum(
            tokens / record["tokens_per_second"]
            for record in records
            if "tokens_per_second" in record
        )
        reference = reference or seconds
        reached = "yes" if val_loss(path) <= NANOGPT_LOSS + 0.0005 else "no"
        figures = [
            str(iters),
            f"{val_loss(path):.4f}",
            reached,
            f"{seconds:.1f}",
            f"{seconds / reference:.3f}",
        ]
        rows.append([title, str(seed), *figures])
    header = [
        "recipe",
        "seed",
        "steps",
        "validation loss",
        f"<= {NANOGPT_LOSS}",
        "training s",
        "of nanoGPT's time",
    ]
    print0("\n" + markdown(header, rows) + "\nGoal: 0.125")


def throughput(settings: TrainingBenchSettings) -> None:
    """Print the floating-point rate of a training step, relative to that of matrix products."""
    size, shapes = (
        (512, (("S", 4),))
        if settings.quick
        else (2048, (("S", 16), ("S", 64), ("M", 4), ("M", 16)))
    )
    a = torch.randn(size, size)
    rate = 2 * size**3 / median_seconds(lambda: a @ a, settings.num_runs)
    rows = []
    for name, batch_size in shapes:
        model = GPT(GPTConfig(vocab_size=65, bias=False, dropout=0.0, **SHAPES[name])).train()
        optimizers = make_optimizers(model, "muon")
        N = model.config.block_size
        x, y = torch.randint(65, (2, batch_size, N))

        def step(model: GPT = model, optimizers=optimizers, x=x, y=y) -> None:
            model(x, y)[1].backward()
            take_step(model, optimizers, 1.0)

        seconds = median_seconds(step, settings.num_runs)
        # Per token, each weight takes 2 operations forward and 4 backward; attention's products are
        # added (Chowdhery et al. 2022, appendix B).
        attention = 12 * model.config.n_layer * model.config.n_embd * N
        operations = (6 * sum(p.numel() for p in model.parameters()) + attention) * x.numel()
        figures = [
            f"{x.numel() / seconds:,.0f}",
            f"{operations / seconds / 1e9:.0f}",
            f"{operations / seconds / rate:.0%}",
        ]
        rows.append([name, str(batch_size), *figures])
    print0(f"\nMatrix products: {rate / 1e9:.0f} GFLOP/s")
    print0(markdown(["model", "batch", "tokens/s", "GFLOP/s", "of the rate (goal 60%)"], rows))


def beside_nanogpt(settings: TrainingBenchSettings) -> None:
    """Print the seconds of nanoGPT's train.py and of ours, from start to end, and both losses."""
    if settings.nanogpt is None:
        print0(
            "\nnanoGPT's own train.py is not timed: name a checkout of nanoGPT with --nanogpt PATH"
        )
        return
    corpus = dataset_folder(settings.dataset).resolve()
    with TemporaryDirectory() as folder:
        copy_nanogpt(Path(settings.nanogpt), corpus, Path(folder))

        def theirs(iters: int) -> list[str]:
            options = NANOGPT_OPTIONS | {"max_iters": iters, "lr_decay_iters": iters}
            if iters < NANOGPT_OPTIONS["max_iters"]:
                # It saves at evaluations; its settings file has 250 steps between them.
                options["eval_interval"] = iters
            return [
                "train.py",
                NANOGPT_FILES[-1],
                *(f"--{name}={value}" for name, value in options.items()),
            ]

        def ours(iters: int) -> list[str]:
            config = str(ROOT / "config/shakespeare_complete_cpu.py")
            options = {
                "dataset": corpus,
                "out_dir": "out",
                "block_size": 64,
                "device": "cpu",
                "max_iters": iters,
            }
            options["eval_interval"] = iters
            return [
                str(ROOT / "train.py"),
                config,
                *(f"--{name}={value}" for name, value in options.items()),
            ]

        ways = {"nanoGPT's own": (theirs, 2000, "out-shakespeare-char/ckpt.pt")}
        ways["ours"] = (ours, settings.max_iters, "out/model_checkpoint.pt")
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for number in range((1 if settings.quick else settings.num_runs) + 1):
            for name, (command, iters, _) in ways.items():
                few = number == 0 or settings.quick  # the first is a warm-up
                start = time.perf_counter()
                run_quietly([sys.executable, *command(min(iters, 10 if few else iters))], folder)
                seconds[name] += [time.perf_counter() - start] if number else []
        losses = {
            name: whole_split_loss(Path(folder, path), corpus)
            for name, (_, _, path) in ways.items()
        }
    reference = seconds["nanoGPT's own"]
    rows = []
    for name, (_, iters, _) in ways.items():
        ratio = statistics.median(
            own / other for own, other in zip(seconds[name], reference, strict=True)
        )
        median = statistics.median(seconds[name])
        rows.append(
            [
                name,
                str(10 if settings.quick else iters),
                f"{losses[name]:.4f}",
                f"{median:.1f}",
                f"{ratio:.3f}",
            ]
        )
    header = ["train.py", "steps", "validation loss", "s, start to end", "of nanoGPT's time"]
    reached = "reached" if losses["ours"] <= losses["nanoGPT's own"] else "not reached"
    print0(
        f"\n{markdown(header, rows)}\nGoal: {1 / 6:.3f}, at nanoGPT's loss or below, which "
        f"is {reached}"
    )


def copy_nanogpt(checkout: Path, corpus: Path, folder: Path) -> None:
    """Copy the files of nanoGPT that train on characters, and our corpus to where they read it."""
    for name in NANOGPT_FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(checkout / name, folder / name)
    (folder / "data/shakespeare_char").mkdir(parents=True)
    for name in ("train.bin", "val.bin", "meta.pkl"):
        shutil.copy(corpus / name, folder / "data/shakespeare_char" / name)


def run_quietly(command: list[str], folder: str) -> str:
    """Run a command and return what it prints. Raise UserError with its last output if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"ERROR: {' '.join(command[1:3])} ended with status {done.returncode}: "
            f"{done.stderr[-500:]}"
        )
    return done.stdout


def whole_split_loss(path: Path, corpus: Path) -> float:
    """Return the loss of a checkpoint on the whole validation split, in nats per token."""
    model = build_model(load_checkpoint(path), path)
    tokens = open_token_file(corpus / "val.bin", "val", model.config.vocab_size)
    return language_model_loss(
        model, WholeSplitBatches(tokens, model.config.block_size, 64, torch.device("cpu"))
    )


def memory(settings: TrainingBenchSettings) -> None:
    """Print the peak anonymous memory of train.py with a small and with a large corpus."""
    peaks = {}
    Path(settings.out_dir).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=settings.out_dir) as folder:
        for num_tokens in (settings.large_tokens // 50, settings.large_tokens):
            corpus = Path(folder, str(num_tokens))
            corpus.mkdir()
            draw = np.random.default_rng(0)
            tokens = np.lib.format.open_memmap(
                corpus / "tokens.npy", "w+", np.uint16, (num_tokens,)
            )
            for first in range(0, num_tokens, 10_000_000):
                tokens[first : first + 10_000_000] = draw.integers(
                    50257, size=len(tokens[first : first + 10_000_000])
                )
            tokens[: num_tokens * 9 // 10].tofile(corpus / "train.bin")
            tokens[num_tokens * 9 // 10 :].tofile(corpus / "val.bin")
            options = [
                "--dataset",
                str(corpus),
                "--out_dir",
                str(corpus / "out"),
                "--device",
                "cpu",
            ]
            options += [
                "--max_iters=3",
                "--eval_interval=3",
                "--batch_size=2",
                "--n_layer=1",
                "--n_head=1",
                "--n_embd=32",
            ]
            process = subprocess.Popen(
                [sys.executable, str(ROOT / "train.py"), *options],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            peak = 0
            while process.poll() is None:
                peak = max(peak, anonymous_kib(process.pid))
                time.sleep(0.01)
            if process.returncode:
                print0(f"train.py ended with status {process.returncode} on {num_tokens:,} tokens")
            peaks[num_tokens] = peak
    shown = ", ".join(
        f"{count * 2 / 1e9:.2f} GB of tokens {kib / 1024:,.0f} MiB" for count, kib in peaks.items()
    )
    print0(f"\nPeak anonymous memory (RssAnon) of train.py: {shown}")


def anonymous_kib(pid: int) -> int:
    """Return the RssAnon of a process in KiB; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("RssAnon:")), 0)


# -------------------------------------------------------------------------------------------------
# all three


def start_up(settings: TrainingBenchSettings) -> None:
    """Print the seconds of each trainer's `--help`, and their excess over `import torch`."""
    bare, trainers = "import torch", ("train.py", "train_reward_model.py", "train_grpo.py")
    ways = {bare: ["-c", bare]} | {
        f"{name} --help": [str(ROOT / name), "--help"] for name in trainers
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range((1 if settings.quick else settings.num_runs) + 1):
        for name, arguments in ways.items():
            start = time.perf_counter()
            run_quietly([sys.executable, *arguments], str(ROOT))
            seconds[name] += [time.perf_counter() - start] if number else []  # the first warms up
    rows = []
    for name, own in seconds.items():
        more = statistics.median(one - other for one, other in zip(own, seconds[bare], strict=True))
        rows.append([name, f"{statistics.median(own):.2f}", f"{more:.2f}"])
    print0("\n" + markdown(["start", "s", "beyond the import, s"], rows))


if __name__ == "__main__":
    run_main(main)
