"""Compare the seconds of train.py with those of nanoGPT's recipe, from start to end.

    python benchmarks/training.py --num_runs 3

Input: the corpus that data/shakespeare_char/prepare.py makes. The ways: the recipe of
config/shakespeare_complete_cpu.py at block size 64; nanoGPT's recipe, config/nanogpt_cpu.py; and
with --nanogpt the same recipe in nanoGPT's own train.py, which is copied and executed. Also prints
each model's loss on the validation split: less time is a gain only at the same loss.
"""

import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from benchmarks.compare import as_words, compare, time_python
from common.files import dataset_folder
from common.process import run_main
from common.settings import Errors, Settings, parse_settings, setting
from data_loader import open_token_file
from losses import text_losses
from training.checkpoint import build_model, load_checkpoint

ROOT = Path(__file__).resolve().parents[1]
# Files of nanoGPT's repository, and the options that its README gives for a CPU.
NANOGPT_FILES = ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py")
NANOGPT_OPTIONS = {
    "device": "cpu",
    "compile": False,
    "eval_iters": 20,
    "log_interval": 1,
    "block_size": 64,
    "batch_size": 12,
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "dropout": 0.0,
}


@dataclass
class TrainingBenchSettings(Settings):
    """Compare the seconds of train.py with nanoGPT's."""

    dataset: str = "shakespeare_char"
    """folder of the corpus of characters: a path, or a name in data/"""
    max_iters: int = setting(215, minimum=1)
    """steps of our recipe"""
    nanogpt_iters: int = setting(2000, minimum=1)
    """steps of nanoGPT's recipe"""
    nanogpt: str | None = None
    """folder of nanoGPT's repository; None: only its recipe is compared"""
    num_runs: int = setting(3, minimum=1)
    """runs of each way"""

    def check_settings(self, errors: Errors) -> None:
        """Check that the repository has the files that are copied."""
        if self.nanogpt is not None:
            for name in NANOGPT_FILES:
                is_there = Path(self.nanogpt, name).is_file()
                errors.check(is_there, f"nanogpt={self.nanogpt}: has no {name}")


def main() -> None:
    settings = parse_settings(TrainingBenchSettings, "training")
    corpus = dataset_folder(settings.dataset).resolve()
    with TemporaryDirectory() as folder:
        commands = {
            "our recipe": our_command("shakespeare_complete_cpu", corpus, settings.max_iters),
            "nanoGPT's recipe": our_command("nanogpt_cpu", corpus, settings.nanogpt_iters),
        }
        checkpoints = {
            "our recipe": "shakespeare_complete_cpu/model_checkpoint.pt",
            "nanoGPT's recipe": "nanogpt_cpu/model_checkpoint.pt",
        }
        if settings.nanogpt is not None:
            copy_nanogpt(Path(settings.nanogpt), corpus, Path(folder))
            commands["nanoGPT"] = nanogpt_command(settings.nanogpt_iters)
            checkpoints["nanoGPT"] = "out-shakespeare-char/ckpt.pt"
        ways = {}
        for name, command in commands.items():
            ways[name] = partial(time_python, command, folder)
        compare("seconds", ways, settings.num_runs, warm_up=False)
        for name, checkpoint in checkpoints.items():
            loss = whole_split_loss(Path(folder, checkpoint), corpus)
            print(f"{name}: loss {loss:.4f} nats per token")


def our_command(config: str, corpus: Path, iters: int) -> list[str]:
    """Return the arguments that train by a settings file of config/."""
    options = {
        "dataset": corpus,
        "out_dir": config,
        "overwrite": True,
        "block_size": 64,
        "device": "cpu",
        "max_iters": iters,
        "eval_interval": iters,
    }
    return [str(ROOT / "train.py"), str(ROOT / f"config/{config}.py"), *as_words(options)]


def nanogpt_command(iters: int) -> list[str]:
    """Return the arguments that train in nanoGPT's train.py; it saves only at evaluations."""
    options = {
        **NANOGPT_OPTIONS,
        "max_iters": iters,
        "lr_decay_iters": iters,
        "eval_interval": min(250, iters),
    }
    return ["train.py", NANOGPT_FILES[-1], *as_words(options)]


def copy_nanogpt(checkout: Path, corpus: Path, folder: Path) -> None:
    """Copy the files of nanoGPT that train on characters, and our corpus to where they read it."""
    copies = {checkout / name: folder / name for name in NANOGPT_FILES}
    for name in ("train.bin", "val.bin", "meta.pkl"):
        copies[corpus / name] = folder / "data/shakespeare_char" / name
    for source, target in copies.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)


def whole_split_loss(path: Path, corpus: Path) -> float:
    """Return the loss of a checkpoint on the whole validation split, in nats per token."""
    model = build_model(load_checkpoint(path), path)
    tokens = open_token_file(corpus / "val.bin", "val", model.config.vocab_size)
    return text_losses(model, tokens).mean().item()


if __name__ == "__main__":
    run_main(main)
