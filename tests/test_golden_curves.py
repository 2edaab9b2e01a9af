"""Thirty steps of each trainer against curves that an earlier version drew: a change of structure
changes no number.

    pytest tests/test_golden_curves.py

tests/data/golden_curves.json holds the curves. A change that is meant to alter them makes them
anew, with CROSSOVER_NEW_CURVES=1, and dev/LOG.md says why. Processors round differently: 1e-7 of a
loss, which thirty steps of Adam make at most some 1e-5. A sampled token that rounding changes would
show as more, so the tokens of these GRPO runs depend on the random numbers only, not on the policy;
and their natural model is not trained, because its 200 steps would amplify rounding further.
"""

import json
import os
from pathlib import Path

import pytest
import torch
from helpers import TINY_GRPO, TINY_TRAIN, succeed

import train_grpo
from common.device import random_stream
from common.log import read_records
from grpo import stopping
from lm import completions
from lm.sampling import Sampling

GOLDEN = Path(__file__).parent / "data" / "golden_curves.json"
STEPS = 30
TOLERANCE = 1e-3
OF_GRPO = ("reward", "kl_start", "entropy", "gradient_norm", "select_loss")
FIGURES = {
    "train": ("train_loss", "gradient_norm", "select_loss", "val_loss"),
    "train_reward_model": ("train_loss", "val_loss"),
    "train_grpo, token credit": OF_GRPO,
    "train_grpo, sequence credit": OF_GRPO,
    "train_grpo, exact credit": ("loss", *OF_GRPO),
}


@pytest.fixture
def likelihood_model(tmp_path, generator, predictive_reward_model) -> Path:
    """A likelihood reward model whose natural model is the generator with noise on its weights."""
    contents = torch.load(predictive_reward_model)
    weights = torch.load(generator)["model"]
    for name in list(contents["model"]):
        if name.startswith("natural."):
            weight = weights[name.removeprefix("natural.")]
            stream = random_stream(1, str(tuple(weight.shape)))  # tied weights stay equal
            noise = torch.from_numpy(stream.normal(0, 0.1, weight.shape)).float()
            contents["model"][name] = weight + noise
    contents["model"]["mixture"] = torch.tensor(2.0)
    path = tmp_path / "likelihood.pt"
    torch.save(contents, path)
    return path


@pytest.fixture
def options(corpus, generator, reward_data, likelihood_model) -> dict[str, dict]:
    """Options of each curve."""
    data = {"base_model_path": generator, "data_dir": reward_data, "device": "cpu"}
    head = {"head": "last", "max_epochs": STEPS, "patience": STEPS}
    head["batch_size"] = 10**4  # one step an epoch
    grpo = {
        "base_model_path": generator,
        "reward_model_path": likelihood_model,
        "dataset": corpus,
        **TINY_GRPO,
    }
    grpo |= {"max_steps": STEPS, "eval_interval": 5}
    return {
        "train": {**TINY_TRAIN, "max_iters": STEPS, "dataset": corpus},
        "train_reward_model": data | head,
        "train_grpo, token credit": grpo | {"credit": "token"},
        "train_grpo, exact credit": grpo | {"credit": "exact"},
        "train_grpo, sequence credit": grpo
        | {"credit": "sequence", "beta": 0.04, "reward": "natural"},
    }


def draw_uniformly(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw uniform token ids (R,) in place of `sample_tokens`, and their log-probabilities (R,)
    under the model.
    """
    log_probs = logits.float().log_softmax(-1)  # (R, V)
    num_ids = int((log_probs[0] > -100).sum())  # without padding ids
    ids = (uniforms * num_ids).long()
    return ids, log_probs.gather(-1, ids[:, None])[:, 0]


@pytest.mark.parametrize("curve", FIGURES)
def test_the_curve_is_the_one_of_before(monkeypatch, tmp_path, options, curve):
    monkeypatch.setattr(completions, "sample_tokens", draw_uniformly)
    monkeypatch.setattr(stopping, "PLATEAU_WINDOWS", STEPS)  # all steps are to be made
    monkeypatch.setattr(train_grpo, "WARMUP", 0)
    script, path = curve.partition(",")[0], tmp_path / "model.pt"
    where = (
        {"out_dir": tmp_path, "checkpoint_name": path.name}
        if script == "train"
        else {"output_path": path}
    )
    succeed(script, **options[curve], **where)
    records = read_records(path.with_suffix(".jsonl"))
    curves = {
        name: [record[name] for record in records if name in record] for name in FIGURES[curve]
    }
    assert len(curves[FIGURES[curve][0]]) == STEPS
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.is_file() else {}
    if os.environ.get("CROSSOVER_NEW_CURVES"):
        GOLDEN.write_text(json.dumps(golden | {curve: curves}, indent=1) + "\n")
        return
    assert curves.keys() == golden[curve].keys()
    for name, values in curves.items():
        assert values == pytest.approx(golden[curve][name], rel=TOLERANCE, abs=TOLERANCE), name
