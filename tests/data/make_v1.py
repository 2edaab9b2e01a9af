"""Make tests/data/v1: tiny artefacts of every kind, which tests/test_old_artefacts.py reads with today's code.

    PYTHONPATH=.:tests python tests/data/make_v1.py FOLDER

Made once, by the code of format version 1, and never again: a change that cannot read them refuses them in one line.
The interrupted runs stop as people stop them, by SIGTERM within a step.
"""

import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

from helpers import TINY_GRPO, TINY_TRAIN, InThisProcess, call, make_corpus, make_text, succeed

import run_cycles
import train
import train_grpo
import train_reward_model

CONFIG = """\
train = dict(n_layer=1, n_head=2, n_embd=16, block_size=16, batch_size=8, max_iters=20, eval_interval=5, warmup_iters=2)
prepare_reward_data = dict(samples_per_chunk=4, max_blocks=40)
train_reward_model = dict(lm_iters=4, lm_eval_interval=2)
train_grpo = dict(prompts_per_step=4, group_size=4, max_steps=3, eval_interval=1, allow_blind_reward=True)
"""


def interrupted(module: ModuleType, function: str, calls: int, script: str, *arguments: str, **options) -> None:
    """Run a script until the given call of a module's function, at which SIGTERM comes."""
    original, met = getattr(module, function), []

    def stopped(*args, **keywords):
        met.append(1)
        if len(met) == calls:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **keywords)

    with mock.patch.object(module, function, stopped):
        finished = call(script, *arguments, **options)
    assert finished.status != 0 and len(met) == calls, finished.err


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    os.chdir(folder)  # paths in the artefacts are relative to it
    make_corpus(Path("corpus"), make_text(1000))
    Path("config.py").write_text(CONFIG, encoding="utf-8")

    # the ledger of a cycle that was stopped in GRPO; with it a generator, reward data and a likelihood reward model
    cycle = {"out_dir": "cycles", "dataset": "corpus", "num_cycles": 1, "sample_tokens": 30, "device": "cpu"}
    with mock.patch.object(run_cycles.subprocess, "Popen", InThisProcess):
        interrupted(train_grpo, "sample_group", 2, "run_cycles", "config.py", **cycle)

    # resume states of the other trainers: of the generator, of the natural model, of a head; and of GRPO, above
    interrupted(train, "get_batch", 13, "train", dataset="corpus", out_dir="train", **TINY_TRAIN)
    data = {"base_model_path": "cycles/base_model_v1.pt", "data_dir": "cycles/reward_data_v1", "device": "cpu"}
    natural = {"dataset": "corpus", "lm_iters": 6, "lm_eval_interval": 2, "output_path": "reward_models/likelihood.pt"}
    interrupted(train_reward_model, "get_batch", 4, "train_reward_model", **data, **natural)
    head = {"max_epochs": 3, "batch_size": 40, "reward_head_hidden_dim": 16, "control": False}
    position = {"head": "position", "output_path": "reward_models/position.pt"}
    interrupted(train_reward_model, "head_loss", 6, "train_reward_model", **data, **head, **position)

    # finished ones: the two other heads, and a policy
    for name in ("last", "position"):
        finished = {**head, "head": name, "max_epochs": 1, "output_path": f"reward_models/finished_{name}.pt"}
        succeed("train_reward_model", **data, **finished)
    grpo = {"base_model_path": "cycles/base_model_v1.pt", "reward_model_path": "cycles/reward_model_v1.pt"}
    succeed("train_grpo", **TINY_GRPO, **grpo, dataset="corpus", max_steps=2, output_path="policy.pt")

    # what goes with a finished artefact and no script reads
    for path in (*Path().rglob("*.png"), *Path().rglob("finished_*.jsonl"), Path("policy.jsonl")):
        path.unlink()
    for path in ("cycles/base_model_v1.resume", "cycles/reward_model_v1.resume", "policy.resume"):
        Path(path).unlink()
    for path in Path("reward_models").glob("finished_*.resume"):
        path.unlink()


if __name__ == "__main__":
    main()
