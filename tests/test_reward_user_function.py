"""reward/user_function.py: a user's reward function is loaded, called, checked and trained with."""

import re
import sys

import pytest
import torch
from helpers import TINY_GRPO, assert_same_weights, refuse_in_one_line, succeed, weights

from common.log import read_records
from common.process import UserError
from grpo import stopping
from lm.checkpoint import load_checkpoint
from reward.user_function import RewardFunction, execute_file

IDS = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
MASK = torch.tensor([[False, True, True], [True, True, True]])
LETTERS = """
from the_letter import LETTER
def share(completions, **kwargs):
    return [text.count(LETTER) / len(text) for text in completions]
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Makes a function `score` of a file with this text; its ids are the letters a, b, c, ..."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(text: str, name: str = "score") -> RewardFunction:
        path = tmp_path / "mine.py"
        path.write_text(text)
        execute_file.cache_clear()
        return RewardFunction(f"{path}:{name}", lambda ids: "".join("abcd"[each] for each in ids))

    return make


def returning(value: str) -> str:
    return f"import math\nimport numpy as np\nimport torch\n\ndef score(**kwargs):\n    return {value}\n"


def error_of(work) -> str:
    with pytest.raises(UserError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("named", "finding"),
    [
        ("mine.py", "must be FILE.py:NAME"),
        ("mine:score", "must be FILE.py:NAME"),
        ("no_such.py:score", "raised FileNotFoundError: [Errno 2]"),
    ],
)
def test_another_form_than_file_and_name(named, finding):
    assert f"reward_function={named}: {finding}" in error_of(lambda: RewardFunction(named))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def score(:\n", "SyntaxError.*line 1"),
        ("\nimport no_such_module\n", "ModuleNotFoundError at line 2: "),
        ("import sys\nsys.exit('bye')\n", "SystemExit at line 2: bye"),
        ("score = 3\n", "has no function 'score'"),
        ("async def score(): pass\n", "'score' is async: write a plain function"),
    ],
)
def test_a_file_that_does_not_load(made, text, expected):
    assert re.search(rf"mine\.py:score: .*{expected}", error_of(lambda: made(text)))


def test_the_file_may_import_from_its_folder_and_is_run_as_no_script(made, tmp_path):
    (tmp_path / "beside_mine.py").write_text("VALUE = 7\n")
    text = "from beside_mine import VALUE\ndef score(prompts, **kwargs): return [VALUE] * len(prompts)\n"
    function = made(text + "if __name__ == '__main__': raise SystemExit\n")
    assert function(IDS, MASK).tolist() == [7, 7]


def test_the_arguments_are_those_of_trl(made):
    """Copies: what the function changes in them changes nothing here."""
    text = "from copy import deepcopy\ncalls = []\ndef score(**kwargs):\n    calls.append(deepcopy(kwargs))\n"
    function = made(text + "    kwargs['completion_ids'].clear()\n    return [1, 2]\n")
    ids = IDS.clone()
    assert function(ids, MASK).tolist() == [1, 2]
    assert torch.equal(ids, IDS)
    assert function.function.__globals__["calls"] == [
        {
            "prompts": ["ab", "d"],
            "completions": ["cd", "cba"],
            "prompt_ids": [[0, 1], [3]],
            "completion_ids": [[2, 3], [2, 1, 0]],
        }
    ]


@pytest.mark.parametrize(
    "value",
    [
        "[1, 2]",
        "torch.tensor([1, 2], dtype=torch.bfloat16, requires_grad=True)",
        "[np.float32(1), torch.tensor(2)]",
    ],
)
def test_numbers_of_several_kinds(made, value):
    rewards = made(returning(value))(IDS, MASK)
    assert rewards.tolist() == [1, 2]
    assert rewards.dtype == torch.float32 and not rewards.requires_grad


@pytest.mark.parametrize(
    "value",
    [
        "None",
        "'good'",
        "[]",
        "[1, 2, 3]",
        "np.zeros((2, 3))",
        "[[1, 2], [3]]",
        "[1, None]",
        "[1, math.nan]",
        "[1, math.inf]",
        "[10 ** 400, 1]",
        "[1j, 1]",
    ],
)
def test_anything_else_is_refused_in_one_line(made, value):
    line = error_of(lambda: made(returning(value))(IDS, MASK))
    assert "mine.py:score: " in line
    assert "return a finite number for each of the 2" in line or "correct it" in line


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("1 / 0", "raised ZeroDivisionError at line 3: division by zero"),
        (
            "raise ValueError('two\\nlines ' + 1000 * 'x')",
            "raised ValueError at line 3: two lines x*; correct it",
        ),
        ("import sys; sys.exit(0)", "raised SystemExit at line 3"),
        ("score(**kwargs)", "raised RecursionError at line [23]"),
    ],
)
def test_an_exception_is_one_line_with_its_place(made, statement, expected):
    function = made(f"def score(**kwargs):\n    print('said')\n    {statement}\n")
    assert re.search(expected, error_of(lambda: function(IDS, MASK)))
    with pytest.raises(KeyboardInterrupt):  # which is no error of the function
        made("def score(**kwargs):\n    raise KeyboardInterrupt\n")(IDS, MASK)


def test_a_policy_learns_what_the_function_rewards(
    tmp_path, monkeypatch, corpus, generator, reward_model
):
    """Alone: no R2 and no P(natural); the records have its rewards. A run is resumed with the
    same file alone.
    """
    monkeypatch.setattr(stopping, "CAPS", {})
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "the_letter.py").write_text("LETTER = 'e'\n")
    options = {
        "base_model_path": generator,
        "dataset": corpus,
        "reward_function": f"{tmp_path}/letters.py:share",
        "output_path": tmp_path / "policy.pt",
        "learning_rate": 1e-2,
        "device": "cpu",
        "max_steps": 12,
        "prompts_per_step": 8,
        "group_size": 8,
        "eval_interval": 6,
    }
    out = succeed("train_grpo", **options)
    records = read_records(options["output_path"].with_suffix(".jsonl"))
    steps, looks = ([record for record in records if name in record] for name in ("loss", "kl_now"))
    assert steps[-1]["function_reward"] > 2 * steps[0]["function_reward"]
    assert looks[-1]["fresh_function_reward_low"] > looks[0]["fresh_function_reward_high"]
    assert looks[0]["natural_function_reward"] == looks[-1]["natural_function_reward"] > 0
    assert all(record["objective"] == record["function_reward"] for record in steps)
    assert not {"reward", "evidence", "fresh_reward", "natural_reward"} & {*steps[0], *looks[0]}
    training = load_checkpoint(options["output_path"])["training"]
    assert training["settings"]["beta"] == 0.04
    assert training["kept_step"] == 12
    assert "R2" not in out
    assert "credit: sequence; prefixes: own; group size: 8;" in out  # what credit=auto chose
    measured = succeed(
        "evaluate",
        checkpoints=[generator, options["output_path"]],
        baseline=generator,
        part="report",
        dataset=corpus,
        reward_function=options["reward_function"],
        function_weight=2,
        device="cpu",
    )
    before, after = re.findall(r"fresh_reward_share (0\.\d+) \(", measured)
    assert float(after) > 2 * float(before)
    weighted = re.findall(r"fresh_function_reward (0\.\d+) \(", measured)
    assert float(weighted[1]) == pytest.approx(2 * float(after), abs=1e-3)

    resumed = {**options, "init_from": "resume", "allow_unpredictive_reward": True}
    assert "reward_model_path was" in refuse_in_one_line(
        "train_grpo", **resumed, reward_model_path=reward_model
    )
    (tmp_path / "letters.py").write_text(LETTERS + "\n")
    assert "letters.py:share was" in refuse_in_one_line("train_grpo", **resumed)


FAILS_ONCE = """
from pathlib import Path
calls = Path(__file__).with_suffix(".calls")
def score(completions, **kwargs):
    count = int(calls.read_text()) + 1
    calls.write_text(str(count))
    if count == {number}:
        raise OSError("the server does not answer")
    return [text.count("e") for text in completions]
"""


@pytest.mark.parametrize(("number", "step"), [(2, None), (6, 3), (7, 4), (10, 5)])
def test_the_state_is_saved_if_a_function_fails(tmp_path, corpus, generator, number, step):
    """Within a step that before it, within an evaluation that after its step; two calls are of each
    evaluation. The corrected function ends in the tensors of a run without a failure.
    """
    path = tmp_path / "policy.pt"
    options = {"base_model_path": generator, "dataset": corpus, "output_path": path}
    options |= {**TINY_GRPO, "max_steps": 7, "eval_interval": 4}
    options["reward_function"] = f"{tmp_path}/mine.py:score"
    (tmp_path / "mine.calls").write_text("0")
    (tmp_path / "mine.py").write_text(FAILS_ONCE.format(number=number))
    line = refuse_in_one_line("train_grpo", **options)
    assert line.endswith("the server does not answer; correct it")
    (tmp_path / "mine.py").write_text(FAILS_ONCE.format(number=-1))
    if step is None:  # nothing is lost
        succeed("train_grpo", **options, overwrite=True)
    else:
        out = succeed("train_grpo", **options, init_from="resume")
        assert f"at step {step}" in out and "mine.py:score failed in the run before: " in out
    whole = {**options, "output_path": tmp_path / "whole.pt"}
    succeed("train_grpo", **whole)
    assert_same_weights(weights(path), weights(whole["output_path"]))
