"""Compare the seconds of train.py with those of nanoGPT's recipe, from start to end.

    python benchmarks/training.py --num_runs 3

Input: the corpus that data/shakespeare_char/prepare.py makes. The ways: the recipe of
config/shakespeare_complete_cpu.py at block size 64, and nanoGPT's recipe, config/nanogpt_cpu.py.
Also prints each model's loss on the validation split: less time is a gain only at the same loss.
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


from benchmarks.compare import as_words, compare, time_python
from common.files import dataset_folder
from common.process import run_main
from common.settings import Settings, parse_settings, setting
from data_loader import open_token_file
from losses import text_losses
from training.checkpoint import build_model, load_checkpoint

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class TrainingBenchSettings(Settings):
    """Compare the seconds of train.py with nanoGPT's."""

    dataset: str = "shakespeare_char"
    """folder of the corpus of characters: a path, or a name in data/"""
    max_iters: int = setting(215, minimum=1)
    """steps of our recipe"""
    nanogpt_iters: int = setting(2000, minimum=1)
    """steps of nanoGPT's recipe"""
    num_runs: int = setting(3, minimum=1)
    """runs of each way"""


def main() -> None:
    settings = parse_settings(TrainingBenchSettings, "training")
    corpus = dataset_folder(settings.dataset).resolve()
    recipes = {
        "our recipe": ("shakespeare_complete_cpu", settings.max_iters),
        "nanoGPT's recipe": ("nanogpt_cpu", settings.nanogpt_iters),
    }
    with TemporaryDirectory() as folder:
        ways = {}
        for name, (config, iters) in recipes.items():
            ways[name] = partial(time_python, our_command(config, corpus, iters), folder)
        compare("seconds", ways, settings.num_runs, warm_up=False)
        for name, (config, _) in recipes.items():
            loss = whole_split_loss(Path(folder, config, "model_checkpoint.pt"), corpus)
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


def whole_split_loss(path: Path, corpus: Path) -> float:
    """Return the loss of a checkpoint on the whole validation split, in nats per token."""
    model = build_model(load_checkpoint(path), path)
    tokens = open_token_file(corpus / "val.bin", "val", model.config.vocab_size)
    return text_losses(model, tokens).mean().item()


if __name__ == "__main__":
    run_main(main)
