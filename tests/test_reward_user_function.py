"""reward/user_function.py: a user's reward function is loaded, called and checked; train_grpo.py trains with it.

pytest tests/test_reward_user_function.py
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import TINY_GRPO, assert_same_weights, call, end_in_call, refuse_in_one_line, succeed, terminate, weights

import train_grpo
from common.files import hash_file
from common.log import read_records
from common.process import UserError
from grpo import policy_evaluation
from reward.user_function import RewardFunction
from training.checkpoint import load_checkpoint

pytest_plugins = ["tiny_run"]

IDS = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
MASK = torch.tensor([[False, True, True], [True, True, True]])
LETTERS = """
def share(completions, **kwargs):
    return [text.count("e") / len(text) for text in completions]

def each(completions, **kwargs):
    return [[float(letter == "e") for letter in text] for text in completions]
"""


@pytest.fixture
def made(tmp_path):
    """Makes a function `score` of a file with this text; its ids are the letters a, b, c, ..."""

    def make(text: str, name: str = "score") -> RewardFunction:
        path = tmp_path / "mine.py"
        path.write_text(text)
        return RewardFunction(f"{path}:{name}", lambda ids: "".join("abcd"[each] for each in ids))

    return make


def returning(value: str) -> str:
    return f"import math\nimport numpy as np\nimport torch\n\ndef score(ids, **kwargs):\n    return {value}\n"


def error_of(work) -> str:
    with pytest.raises(UserError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("named", ["mine.py", "mine:score", "mine.py:", "mine.py:a b", ":score", "no_such.py:score"])
def test_another_form_than_file_and_name(named):
    assert f"reward_function={named}: must be FILE.py:NAME" in error_of(lambda: RewardFunction(named))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def score(:\n", "SyntaxError.*line 1"),
        ("\nimport no_such_module\n", "ModuleNotFoundError at line 2 of"),
        ("import sys\nsys.exit('bye')\n", "SystemExit at line 2 of .*: bye"),
        ("def scores(): pass\n", "has no function 'score'"),
        ("score = 3\n", "has no function 'score'"),
    ],
)
def test_a_file_that_does_not_load(made, text, expected):
    assert re.search(rf"mine\.py:score: .*{expected}", error_of(lambda: made(text)))


def test_the_file_may_import_from_its_folder_and_is_run_as_no_script(made, tmp_path):
    (tmp_path / "beside_mine.py").write_text("VALUE = 7\n")
    text = "from beside_mine import VALUE\ndef score(ids): return [VALUE] * len(ids)\n"
    function = made(text + "if __name__ == '__main__': raise SystemExit\n")
    assert function(IDS, MASK).tolist() == [7, 7]
    assert function.sha256 == hash_file(tmp_path / "mine.py")


def test_the_arguments_are_those_of_trl_and_the_arrays(made):
    function = made("calls = []\ndef score(**kwargs):\n    calls.append(kwargs)\n    return [0, 0]\n")
    function(IDS, MASK)
    (given,) = function.function.__globals__["calls"]
    assert given["prompts"] == ["ab", "d"] and given["completions"] == ["cd", "cba"]
    assert given["prompt_ids"] == [[0, 1], [3]] and given["completion_ids"] == [[2, 3], [2, 1, 0]]
    assert given["ids"].dtype == np.int64 and given["ids"].tolist() == IDS.tolist()
    assert given["masks"].dtype == bool and given["masks"].tolist() == MASK.tolist()


def test_what_the_function_changes_is_a_copy(made):
    text = "def score(ids, masks, completion_ids):\n    ids[:] = 9; masks[:] = False; completion_ids.clear()\n"
    function = made(text + "    return [1, 2]\n")
    ids, mask = IDS.clone(), MASK.clone()
    assert function(ids, mask).tolist() == [1, 2]
    assert torch.equal(ids, IDS) and torch.equal(mask, MASK)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[1, 2.5]", [1, 2.5]),
        ("(True, False)", [1, 0]),
        ("np.array([1, 2], dtype=np.float16)", [1, 2]),
        ("torch.tensor([1, 2], dtype=torch.bfloat16, requires_grad=True)", [1, 2]),
        ("[np.float32(1), torch.tensor(2)]", [1, 2]),
        ("[[5, 6], [7, 8, 9]]", [[0, 5, 6], [7, 8, 9]]),
        ("[np.array([5, 6]), torch.tensor([7, 8, 9])]", [[0, 5, 6], [7, 8, 9]]),
        ("np.array([[math.nan, 5, 6], [7, 8, 9]])", [[0, 5, 6], [7, 8, 9]]),  # not written: not read
        ("torch.tensor([[4, 5, 6], [7, 8, 9]])", [[0, 5, 6], [7, 8, 9]]),
    ],
)
def test_numbers_of_sequences_and_of_tokens(made, value, expected):
    function = made(returning(value))
    rewards = function(IDS, MASK)
    assert rewards.tolist() == expected and rewards.dtype == torch.float32 and not rewards.requires_grad


@pytest.mark.parametrize(
    "value",
    [
        *("None", "3.0", "'good'", "{'a': 1}", "[]", "[1, 2, 3]", "np.zeros(3)", "np.zeros((2, 4))"),
        *("np.zeros((2, 3, 1))", "[[1, 2], [3]]", "[1, [1, 2, 3]]", "[1, math.nan]", "[-math.inf, 1]", "[1e13, 1]"),
        *("[10 ** 400, 1]", "[1j, 1]", "[None, 1]", "['1', 1]", "[[1, math.inf], [1, 2, 3]]"),
        "torch.zeros(2, device='meta')",
    ],
)
def test_anything_else_is_refused_with_the_rule(made, value):
    line = error_of(lambda: made(returning(value))(IDS, MASK))
    assert "mine.py:score: " in line and ("finite number" in line or "mend" in line)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("1 / 0", "raised ZeroDivisionError at line 3 of .*mine.py: division by zero"),
        ("raise ValueError('two\\nlines ' + 1000 * 'x')", "raised ValueError at line 3 of .*: two lines x{190}; "),
        ("import sys; sys.exit(0)", "raised SystemExit at line 3"),
        ("score(**kwargs)", "raised RecursionError at line [23]"),
    ],
)
def test_an_exception_is_one_line_with_its_place(made, statement, expected):
    function = made(f"def score(**kwargs):\n    print('said')\n    {statement}\n")
    assert re.search(expected, error_of(lambda: function(IDS, MASK)))


def test_ctrl_c_is_no_error_of_the_function(made):
    function = made("def score(**kwargs):\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        function(IDS, MASK)


# ---------------------------------------------------------------------------------------------------------------------
# training


@pytest.fixture
def good(tmp_path, corpus, generator) -> dict:
    """Options with which train_grpo.py runs, with the share of a letter as its only reward."""
    (tmp_path / "letters.py").write_text(LETTERS)
    named = {"reward_function": f"{tmp_path}/letters.py:share", "output_path": tmp_path / "out" / "policy.pt"}
    return {**TINY_GRPO, "base_model_path": generator, "dataset": corpus, "max_steps": 2, **named}


def records_of(options: dict) -> tuple[list[dict], list[dict]]:
    """Records of steps, and of evaluations."""
    records = read_records(Path(options["output_path"]).with_suffix(".jsonl"))
    return [r for r in records if "loss" in r], [r for r in records if "kl_now" in r]


@pytest.mark.parametrize("name", ["share", "each"])
def test_a_policy_learns_what_the_function_rewards(good, tmp_path, monkeypatch, name):
    """Alone, for sequences and for tokens: no gate and no P(natural); the records have the function's rewards."""
    monkeypatch.setattr(policy_evaluation, "CAPS", {})
    options = {**good, "learning_rate": 1e-2, "max_steps": 12, "prompts_per_step": 8, "group_size": 8}
    options |= {"reward_function": f"{tmp_path}/letters.py:{name}", "eval_interval": 6}
    out = succeed("train_grpo", **options)
    steps, looks = records_of(options)
    assert steps[-1]["function_reward"] > 2 * steps[0]["function_reward"]
    assert looks[-1]["fresh_function_reward_low"] > looks[0]["fresh_function_reward_high"]
    assert looks[0]["natural_function_reward"] == looks[-2]["natural_function_reward"] > 0
    assert all(record["total_reward"] == record["function_reward"] for record in steps)
    assert not {"reward", "evidence", "fresh_reward", "natural_reward"} & {*steps[0], *looks[0]}
    training = load_checkpoint(options["output_path"])["training"]
    assert training["settings"]["beta"] == 0.04
    assert training["kept_step"] == 12 and training["last_reward"] > training["first_reward"]
    assert "letters.py" in out and "executed" in out and "R2" not in out
    assert options["output_path"].with_suffix(".png").is_file()


@pytest.mark.parametrize(("name", "credit"), [("share", "token"), ("each", "sequence")])
def test_the_total_reward_by_hand(good, monkeypatch, tmp_path, predictive_reward_model, name, credit):
    """The advantages are those of evidence - KL + the function's numbers."""
    seen, batches, original = [], [], train_grpo.advantages_of
    for formula in ("token_advantages", "group_advantages"):
        own = getattr(train_grpo.formulas, formula)
        spy = lambda rewards, *a, own=own: seen.append(rewards) or own(rewards, *a)  # noqa: E731
        monkeypatch.setattr(train_grpo.formulas, formula, spy)
    monkeypatch.setattr(train_grpo, "advantages_of", lambda b, *a: batches.append(b) or original(b, *a))
    options = {**good, "reward_model_path": predictive_reward_model, "max_steps": 1, "credit": credit}
    options["reward_function"] = f"{tmp_path}/letters.py:{name}"
    succeed("train_grpo", **options)
    (batch,), (rewards,) = batches, seen
    scores, mask, function = batch.scores, batch.mask, batch.scores.function
    tokens = scores.evidence - (batch.old_log_probs - scores.reference_log_probs)
    if credit == "sequence":
        tokens, function = ((each * mask).sum(1) / mask.sum(1) for each in (tokens, function))
    else:
        function = function[:, None] * mask
    assert function.std() > 0
    torch.testing.assert_close(rewards, tokens + function)


def test_a_resumed_run_ends_in_the_same_bits_and_a_changed_file_is_refused(good, tmp_path, monkeypatch, reward_model):
    options = {**good, "max_steps": 4}
    succeed("train_grpo", **options)
    parts = {**options, "output_path": tmp_path / "parts" / "policy.pt"}
    with monkeypatch.context() as patch:
        end_in_call(patch, train_grpo, "sample", 3, terminate)
        assert call("train_grpo", **parts).status == 143
    parts["init_from"] = "resume"
    (tmp_path / "letters.py").write_text(LETTERS + "# another\n")
    assert "reward function was" in refuse_in_one_line("train_grpo", **parts)
    (tmp_path / "letters.py").write_text(LETTERS)
    assert "reward model was" in refuse_in_one_line("train_grpo", **parts, reward_model_path=reward_model)
    succeed("train_grpo", **parts)
    assert_same_weights(weights(parts["output_path"]), weights(options["output_path"]))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def score(**kwargs):\n    return None\n", "TypeError"),
        ("import sys\ndef score(**kwargs):\n    print('noise')\n    sys.exit(0)\n", "SystemExit at line 4"),
        ("raise OSError(2, 'no data')\n", "FileNotFoundError at line 1"),
    ],
)
def test_a_hostile_function_ends_the_run_in_one_line(good, tmp_path, text, expected):
    (tmp_path / "letters.py").write_text(text)
    line = refuse_in_one_line("train_grpo", **{**good, "reward_function": f"{tmp_path}/letters.py:score"})
    assert expected in line and not good["output_path"].exists()
