"""reward_function.py: a user's reward function is loaded, called and checked; train_grpo.py trains with it.

pytest tests/test_reward_function.py
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import (
    TINY_GRPO,
    assert_same_weights,
    call,
    end_in_call,
    refuse,
    refuse_in_one_line,
    run_ranks,
    succeed,
    terminate,
    untimed,
    weights,
)

import train_grpo
from cycle_stages import CycleSettings, controls_of, policy_stage
from grpo.policy_loss import rewards_of_sequences, rewards_of_tokens, rewards_to_go
from reward.user_function import ARGUMENTS, RewardFunction
from runtime.files import hash_file
from runtime.process import UserError
from runtime.run_log import read_records
from train_grpo import GRPOSettings
from training.checkpoint import load_checkpoint

pytest_plugins = ["tiny_run"]

IDS = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
MASK = torch.tensor([[False, True, True], [True, True, True]])
LETTERS = """
def share(completions, **kwargs):
    return [text.count("e") / len(text) for text in completions]

def each(completions, **kwargs):
    return [[float(letter == "e") for letter in text] for text in completions]

def huge(completions, **kwargs):
    return [1e6 * text.count("e") for text in completions]
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


# ---------------------------------------------------------------------------------------------------------------------
# loading


@pytest.mark.parametrize("named", ["mine.py", "mine:score", "mine.py:", "mine.py:a b", ":score", "mine.py:score:"])
def test_another_form_than_file_and_name(named):
    assert f"reward_function={named}: must be FILE.py:NAME" in error_of(lambda: RewardFunction(named))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def score(:\n", "cannot be imported: SyntaxError at line 1 of"),
        ("\nimport no_such_module\n", "cannot be imported: ModuleNotFoundError at line 2 of"),
        ("import sys\nsys.exit('bye')\n", "cannot be imported: sys.exit at line 2 of .*: bye"),
        ("def scores(): pass\n", "has no 'score'; it has scores"),
        ("score = 3\n", "is an int, not a function"),
        ("async def score(**kwargs): pass\n", "is an async function"),
        ("def score(completions, answer, **kwargs): pass\n", "needs an argument 'answer'; .* prompts, completions, "),
        ("def score(completions, /, **kwargs): pass\n", "needs an argument 'completions'"),
    ],
)
def test_a_file_that_does_not_load(made, text, expected):
    assert re.search(rf"mine\.py:score: .*{expected}", error_of(lambda: made(text)))


def test_a_missing_file(tmp_path):
    assert f"file not found: {tmp_path}/no.py" in error_of(lambda: RewardFunction(f"{tmp_path}/no.py:score"))


def test_the_file_may_import_from_its_folder_and_is_run_as_no_script(made, tmp_path):
    (tmp_path / "beside_mine.py").write_text("VALUE = 7\n")
    text = "from beside_mine import VALUE\ndef score(ids): return [VALUE] * len(ids)\n"
    function = made(text + "if __name__ == '__main__': raise SystemExit\n")
    assert function(IDS, MASK).tolist() == [7, 7]
    assert function.sha256 == hash_file(tmp_path / "mine.py")


# ---------------------------------------------------------------------------------------------------------------------
# calls


def test_the_arguments_are_those_of_trl_and_the_arrays(made):
    function = made("calls = []\ndef score(**kwargs):\n    calls.append(kwargs)\n    return [0, 0]\n")
    function(IDS, MASK)
    (given,) = function.function.__globals__["calls"]
    assert tuple(given) == ARGUMENTS
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
    assert function.per_token == isinstance(expected[0], list)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("None", "returned None"),
        ("3.0", "returned a float"),
        ("'good'", "returned 'good'"),
        ("{'a': 1}", "returned a dict"),
        ("(x for x in ids)", "returned a generator"),
        ("[]", "0 values for R=2"),
        ("[1, 2, 3]", "3 values for R=2"),
        ("np.zeros(3)", "3 values for R=2"),
        ("np.zeros((2, 4))", "4 values for the 2 written tokens of sequence 0"),
        ("np.zeros((2, 3, 1))", "a list for a token of sequence 0"),
        ("[[1, 2], [3]]", "1 values for the 3 written tokens of sequence 1"),
        ("[1, [1, 2, 3]]", "an int for sequence 0, and lists for others"),
        ("[1, math.nan]", "nan for sequence 1"),
        ("[-math.inf, 1]", "-inf for sequence 0"),
        ("[1e13, 1]", "1e"),
        ("[10 ** 400, 1]", "a huge integer for sequence 0"),
        ("[1j, 1]", "a complex for sequence 0"),
        ("[None, 1]", "None for sequence 0"),
        ("['1', 1]", "'1' for sequence 0"),
        ("[[1, math.inf], [1, 2, 3]]", "inf for a token of sequence 0"),
        ("torch.zeros(2, device='meta')", "cannot be read"),
    ],
)
def test_anything_else_is_refused_with_the_rule(made, value, expected):
    line = error_of(lambda: made(returning(value))(IDS, MASK))
    assert "mine.py:score: " in line and expected in line and ("one finite number" in line or "mend" in line)


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("1 / 0", "raised ZeroDivisionError at line 3 of .*mine.py: division by zero"),
        ("raise ValueError('two\\nlines ' + 1000 * 'x')", "raised ValueError at line 3 of .*: two lines x{190}; "),
        ("import sys; sys.exit(0)", "raised sys.exit at line 3"),
        ("raise GeneratorExit", "raised GeneratorExit at line 3"),
        ("len(5)", "raised TypeError at line 3"),
        ("score(**kwargs)", "raised RecursionError at line [23]"),
    ],
)
def test_an_exception_is_one_line_with_its_place(made, statement, expected):
    function = made(f"def score(**kwargs):\n    print('said')\n    {statement}\n")
    assert re.search(expected, error_of(lambda: function(IDS, MASK)))


def test_another_default_dtype_of_the_file_changes_nothing(made):
    source = "import torch\ntorch.set_default_dtype(torch.float64)\n"
    try:
        found = made(source + returning("[[0.5], [1, 2, 3]]"))(IDS, torch.tensor([[0, 0, 1], [1, 1, 1]]).bool())
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32 and found.tolist() == [[0, 0, 0.5], [1, 2, 3]]


def test_ctrl_c_is_no_error_of_the_function(made):
    function = made("def score(**kwargs):\n    raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        function(IDS, MASK)


def test_the_kind_of_numbers_stays(made):
    function = made(returning("[1, 2] if ids[0, 0] == 0 else [[1, 2, 3], [4, 5]]"))
    function(IDS, MASK)
    assert "at its first call for each sequence" in error_of(lambda: function(IDS.flip(0), MASK.flip(0)))


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_a_sequence_s_reward_is_in_the_return_of_each_token_once(discount):
    rewards = rewards_of_tokens(torch.tensor([2.0, -3.0]), MASK, discount)
    expected = torch.tensor([[0.0, 2, 2], [-3, -3, -3]])
    assert torch.equal(rewards_to_go(rewards, MASK, discount), expected)
    assert discount or torch.equal(rewards, expected)
    of_tokens = torch.tensor([[0.0, 1, 3], [3, 4, 5]])
    assert rewards_of_tokens(of_tokens, MASK, discount) is of_tokens
    assert rewards_of_sequences(of_tokens, MASK).tolist() == [2, 4]


# ---------------------------------------------------------------------------------------------------------------------
# training


@pytest.fixture
def good(tmp_path, corpus, generator) -> dict:
    """Options with which train_grpo.py runs, with the share of a letter as its only reward."""
    (tmp_path / "letters.py").write_text(LETTERS)
    options = {**TINY_GRPO, "base_model_path": generator, "dataset": corpus, "max_steps": 2, "eval_prompts": 12}
    return {
        **options,
        "reward_function": f"{tmp_path}/letters.py:share",
        "output_path": tmp_path / "out" / "policy.pt",
    }


def records_of(options: dict) -> tuple[list[dict], list[dict]]:
    """Records of steps, and of evaluations."""
    records = read_records(Path(options["output_path"]).with_suffix(".jsonl"))
    return [r for r in records if "loss" in r], [r for r in records if "kl_now" in r]


@pytest.mark.parametrize("name", ["share", "each"])
def test_a_policy_learns_what_the_function_rewards(good, tmp_path, name):
    """Alone, for sequences and for tokens: no gate and no P(natural); the records have the function's rewards."""
    free = {"start_kl_cap": 9.0, "natural_loss_cap": 9.0, "update_kl_cap": 9.0, "learning_rate": 1e-2}
    named = f"{tmp_path}/letters.py:{name}"
    options = {**good, **free, "reward_function": named, "max_steps": 12, "prompts_per_step": 8, "group_size": 8}
    out = succeed("train_grpo", **{**options, "eval_interval": 6})
    steps, looks = records_of(options)
    assert steps[-1]["function_reward"] > 3 * steps[0]["function_reward"]
    assert looks[-1]["fresh_function_reward_low"] > looks[0]["fresh_function_reward_high"]
    assert looks[0]["natural_function_reward"] == looks[-2]["natural_function_reward"] > 0
    assert all(record["total_reward"] == record["function_reward"] for record in steps)
    assert not {"reward", "evidence", "fresh_reward", "natural_reward", "above_natural"} & {*steps[0], *looks[0]}
    training = load_checkpoint(options["output_path"])["training"]
    chosen = {"reward": "function", "best_by": "reward", "beta": 0.04, "kl_in_reward": 0.0, "reward_function": named}
    chosen["credit"] = "token" if name == "each" else "sequence"
    assert {key: training["settings"][key] for key in chosen} == chosen
    assert training["reward_function_sha256"] == hash_file(tmp_path / "letters.py")
    assert training["kept_step"] == 12 and training["last_reward"] > training["first_reward"]
    assert f"Reward function: {named}" in out and f"No gate: {named} " in out and f"Reward of {named}" in out
    assert options["output_path"].with_suffix(".png").is_file()


def test_a_plateau_names_the_function(good):
    out = succeed("train_grpo", **good, plateau_patience=1, plateau_min_delta=9.0)
    assert f"in the reward of {good['reward_function']}" in out


def test_a_weight_of_0_changes_no_weight(good, tmp_path, predictive_reward_model):
    """Added to a reward model with evidence: one with weight 0 has the bits of the run without, one with 1 has not."""
    common = {**good, "reward_model_path": predictive_reward_model}
    del common["reward_function"]
    succeed("train_grpo", **{**common, "output_path": tmp_path / "without.pt"})
    for weight in (0, 1):
        more = {"reward_function": good["reward_function"], "reward_function_weight": weight}
        out = succeed("train_grpo", **{**common, **more, "output_path": tmp_path / f"{weight}.pt"})
        assert f"Reward: evidence + {good['reward_function']}, credit for each token" in out and "R2 " in out
    assert_same_weights(weights(tmp_path / "0.pt"), weights(tmp_path / "without.pt"))
    steps, looks = records_of({"output_path": tmp_path / "0.pt"})
    of_it = {"function_reward", "function_reward_std", "total_reward"}
    assert of_it <= steps[0].keys() and {"reward", "evidence"} <= steps[0].keys()
    before, _ = records_of({"output_path": tmp_path / "without.pt"})
    for one, other in zip(steps, before, strict=True):
        assert all(one[name] == other[name] for name in other.keys() - {"seconds"})
    assert looks[0]["fresh_total_reward"] == pytest.approx(-looks[0]["kl_mixture"], abs=0.05)
    both, alone = (load_checkpoint(tmp_path / f"{name}.pt")["training"]["settings"] for name in ("1", "without"))
    assert (both["best_by"], alone["best_by"]) == ("reward", "divergence")
    other, _ = records_of({"output_path": tmp_path / "1.pt"})
    assert other[1]["kl_start"] != steps[1]["kl_start"]


@pytest.mark.parametrize(("name", "credit"), [("share", "token"), ("each", "sequence")])
def test_the_total_reward_by_hand(good, monkeypatch, tmp_path, predictive_reward_model, name, credit):
    """The advantages are those of evidence - KL + weight times the function's numbers."""
    seen = []
    for formula in ("token_advantages", "group_advantages"):
        original = getattr(train_grpo, formula)
        monkeypatch.setattr(
            train_grpo, formula, lambda rewards, *a, o=original, **k: seen.append(rewards) or o(rewards, *a, **k)
        )
    original = train_grpo.figures_of_rollouts
    batches = []
    monkeypatch.setattr(train_grpo, "figures_of_rollouts", lambda b, s: batches.append(b) or original(b, s))
    options = {**good, "reward_model_path": predictive_reward_model, "max_steps": 1, "credit": credit}
    options["reward_function"] = f"{tmp_path}/letters.py:{name}"
    succeed("train_grpo", **options, reward_function_weight=-2.5)
    (batch,), (rewards,) = batches, seen
    scores, mask = batch.scores, batch.mask
    tokens = scores.evidence - (batch.old_log_probs - scores.reference_log_probs)
    function = scores.function
    if credit == "sequence":
        tokens = (tokens * mask).sum(1) / mask.sum(1)
        function = (function * mask).sum(1) / mask.sum(1) if name == "each" else function
    elif name == "share":
        function = function[:, None] * mask
    assert function.std() > 0
    torch.testing.assert_close(rewards, tokens - 2.5 * function)


def test_the_gate_names_the_function(good, tmp_path, predictive_reward_model):
    options = {**good, "reward_model_path": predictive_reward_model}
    out = succeed("train_grpo", **options, gate_path=tmp_path / "gate.json")
    assert json.loads((tmp_path / "gate.json").read_text())["reward_function"] == good["reward_function"]
    assert f"{good['reward_function']} passes no gate" in out


def test_a_resumed_run_ends_in_the_same_bits_and_a_changed_file_is_refused(good, tmp_path, monkeypatch, reward_model):
    options = {**good, "max_steps": 4}
    succeed("train_grpo", **options)
    parts = {**options, "output_path": tmp_path / "parts" / "policy.pt"}
    with monkeypatch.context() as patch:
        end_in_call(patch, train_grpo, "sample_group", 4, terminate)  # the first call is the one before the training
        assert call("train_grpo", **parts).status == 143
    parts["init_from"] = "resume"
    (tmp_path / "letters.py").write_text(LETTERS + "# another\n")
    assert "read another reward function" in refuse_in_one_line("train_grpo", **parts)
    (tmp_path / "letters.py").write_text(LETTERS)
    without = {name: value for name, value in parts.items() if name != "reward_function"}
    line = refuse_in_one_line("train_grpo", **without, reward_model_path=reward_model)
    assert "reward_function" in line
    assert "another reward model" in refuse_in_one_line("train_grpo", **parts, reward_model_path=reward_model)
    line = refuse_in_one_line("train_grpo", **{**parts, "reward_function_weight": 2.0})
    assert "reward_function_weight" in line
    succeed("train_grpo", **parts)
    assert_same_weights(weights(parts["output_path"]), weights(options["output_path"]))
    assert untimed(tmp_path / "parts" / "policy.jsonl") == untimed(tmp_path / "out" / "policy.jsonl")


def test_two_ranks_are_as_one(good, tmp_path):
    succeed("train_grpo", **good)
    two = {**good, "output_path": tmp_path / "two" / "policy.pt"}
    finished = run_ranks(2, "train_grpo.py", **two)
    assert finished.status == 0, finished.err
    ours, theirs = (records_of(options)[0] for options in (good, two))
    for one, other in zip(ours, theirs, strict=True):
        assert other["function_reward"] == pytest.approx(one["function_reward"], abs=1e-6)


def test_an_error_on_one_rank_ends_all(good, tmp_path):
    text = "import os\ndef score(ids):\n    assert os.environ['RANK'] == '0', 'here'\n    return [0.0] * len(ids)\n"
    (tmp_path / "letters.py").write_text(text)
    finished = run_ranks(2, "train_grpo.py", **{**good, "reward_function": f"{tmp_path}/letters.py:score"})
    assert finished.status == 2
    assert "rank 1 on " in finished.err and "AssertionError at line 3" in finished.err
    assert "Traceback" not in finished.err


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def score(**kwargs):\n    return None\n", "ERROR: .*:score: returned None"),
        ("import sys\ndef score(**kwargs):\n    print('noise')\n    sys.exit(0)\n", "raised sys.exit at line 4"),
        ("def score(**kwargs):\n    raise KeyError('answer')\n", "raised KeyError at line 2 of .*: 'answer'"),
        ("raise OSError(2, 'no data')\n", "cannot be imported: FileNotFoundError at line 1"),
    ],
)
def test_a_hostile_function_ends_the_run_before_it_begins(good, tmp_path, text, expected):
    (tmp_path / "letters.py").write_text(text)
    line = refuse_in_one_line("train_grpo", **{**good, "reward_function": f"{tmp_path}/letters.py:score"})
    assert re.search(expected, line)
    assert not (tmp_path / "out").exists()


def test_a_function_that_fails_later_leaves_what_was_saved(good, tmp_path):
    text = "calls = []\ndef score(ids):\n    calls.append(1)\n    return [1 / (len(calls) < 7) - 1] * len(ids)\n"
    (tmp_path / "letters.py").write_text(text)
    options = {**good, "reward_function": f"{tmp_path}/letters.py:score", "max_steps": 6}
    line = refuse_in_one_line("train_grpo", **options, plateau_patience=100)
    assert re.search(r"ERROR: step \d: .*ZeroDivisionError at line 4.*--init_from resume goes on from step 2", line)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"credit": "distribution"}, ["credit=distribution", "--baseline position"]),
        ({"baseline": "value", "credit": "token"}, ["baseline=value", "--baseline position"]),
        ({"reward_function_weight": "nan"}, ["reward_function_weight=nan"]),
        ({"reward_function_weight": "inf"}, ["reward_function_weight=inf"]),
        ({"reward_function_weight": 0}, ["reward_function_weight=0"]),
        ({"reward": "natural"}, ["reward=natural", "--reward_model_path"]),
        ({"reward": "evidence"}, ["reward=evidence", "--reward_model_path"]),
        ({"reward_threshold": 0.5}, ["reward_threshold=0.5", "--reward_model_path"]),
        ({"natural_threshold": 0.5}, ["natural_threshold=0.5", "--reward_model_path"]),
        ({"best_by": "nearest"}, ["best_by=nearest", "--reward_model_path"]),
        ({"best_by": "divergence"}, ["best_by=divergence", "--reward_model_path"]),
        ({"gate_path": "gate.json"}, ["gate_path=gate.json", "--reward_model_path"]),
    ],
    ids=str,
)
def test_options_that_a_function_alone_refuses(good, tmp_path, options, names):
    err = refuse("train_grpo", **{**good, **options})
    errors = [line for line in err.splitlines() if line.startswith("  ERROR: ")]
    assert len(errors) == 1 and all(name in err for name in names), err
    assert not (tmp_path / "out").exists()


def test_a_cycle_reads_the_file_and_has_no_control_by_distillation(tmp_path):
    """The optimum of such a reward is no mixture; the file is an input of the stages that name it."""
    named = f"{tmp_path}/letters.py:share"
    (tmp_path / "letters.py").write_text(LETTERS)
    stage = policy_stage(1, tmp_path, tmp_path, tmp_path / "reward_model.pt")
    assert stage.files({"reward_function": named})["reward_function"] == tmp_path / "letters.py"
    assert "reward_function" not in stage.files({"reward_function": None})
    (tmp_path / "config.py").write_text(f"train_grpo = dict(reward_function={named!r})\n")
    for path, has_control in ((str(tmp_path / "config.py"), False), (None, True)):
        assert bool(controls_of(path, tmp_path, CycleSettings()).exact) == has_control


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"reward_model_path": None}, "reward_model_path is required"),
        ({"reward_function_weight": 2.0}, "reward_function_weight=2 needs a reward_function"),
        ({"best_by": "reward"}, "best_by=reward needs a reward_function"),
        ({"reward": "function"}, "reward=function is for a reward_function alone"),
        ({"reward": "function", "reward_function": "a.py:b"}, "reward=function is for a reward_function alone"),
    ],
    ids=str,
)
def test_options_that_need_a_function(options, error):
    settings = GRPOSettings(**{"base_model_path": __file__, "reward_model_path": __file__, **options})
    assert settings.problems().errors == [error]
