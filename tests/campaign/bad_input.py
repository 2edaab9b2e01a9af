"""Bad input: any value of any option ends in success or in a clear line with exit status 2, never
in a traceback.

So does any settings file in nanoGPT's form.

python tests/campaign/run.py --parts bad_input
"""

import random
from dataclasses import fields
from pathlib import Path

from world import World, expect_refusal

from common.settings import Settings
from evaluate import EvaluateSettings
from grpo.settings import GRPOSettings
from prepare_reward_data import RewardDataConfig
from sample import SampleSettings
from train import TrainSettings
from train_reward_model import RewardModelSettings

SETTINGS: dict[str, type[Settings]] = {
    "train": TrainSettings,
    "prepare_reward_data": RewardDataConfig,
    "train_reward_model": RewardModelSettings,
    "train_grpo": GRPOSettings,
    "evaluate": EvaluateSettings,
    "sample": SampleSettings,
}
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "nan",
    "inf",
    "-inf",
    "1e400",
    "1e-9",
    "0.5",
    "99999999999999999999",
    "nan 1",
)
WORDS = (
    "None",
    "True",
    "",
    " ",
    "x",
    "é",
    "\x07",
    "../..",
    "/dev/null",
    "gpt2",
    "a/b",
    "cuda:7",
    "token",
    "[1, 2]",
)
VALUES = (*NUMBERS, *WORDS, "--seed", "\ud800")

EXPRESSIONS = (
    "2**4",
    "5 * 8",
    "2e1",
    "'ft-' + str(time.time())",
    "1e-3",
    "True",
    "2**9**9",
    "-(8**.5)",
    "1 / 0",
    "[1]",
)
EXPRESSIONS += (
    "{1: 2}",
    "dict(a=1)",
    "open('x')",
    "x",
    "'a' * 9",
    "str(str)",
    "time.time(1)",
    "None",
    "'\ud83d'",
    "(",
)


def settings_file(draw: random.Random) -> bytes:
    """A settings file in nanoGPT's form, with names that train.py has, accepts or does not know."""
    names = [
        *(each.name for each in fields(TrainSettings)),
        *TrainSettings.without_effect,
        "use_svd",
        "train",
    ]
    lines = [
        draw.choice(
            ["import time", "import os, sys", "from os import *", "# a comment", "", "print('x')"]
        )
    ]
    lines += [
        f"{draw.choice(names)} = {draw.choice(EXPRESSIONS)} # why"
        for _ in range(draw.choice([1, 1, 2, 6]))
    ]
    start = draw.choice([b"", b"\xef\xbb\xbf"])
    return start + draw.choice(["\n", "\r\n"]).join(lines).encode(errors="surrogatepass")


def attempt(world: World, draw: random.Random, folder: Path) -> None:
    """One script with one or two of its options at values that nobody means."""
    folder.mkdir()
    script = draw.choice(sorted(SETTINGS))
    names = [each.name for each in fields(SETTINGS[script])]
    chosen = {draw.choice(names): draw.choice(VALUES) for _ in range(draw.choice([1, 1, 2]))}
    if draw.random() < 0.3:
        script, chosen = "train", {"config": folder / "settings.py"}
        (folder / "settings.py").write_bytes(settings_file(draw))
    elif draw.random() < 0.1:
        chosen = {draw.choice(names)[:-1] + "q": "1"}
    small = {
        "max_iters": 2,
        "max_steps": 1,
        "max_epochs": 1,
        "max_new_tokens": 3,
        "eval_interval": 1,
    }
    options = {**world.commands(folder / "out")[script]}
    options |= {name: value for name, value in small.items() if name in names}
    expect_refusal(script, options | chosen, f"{script} {chosen!r}:", folder, statuses=(0, 2))
