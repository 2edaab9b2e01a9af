"""One tiny run of every stage, as fixtures that the session shares.

    python -m pytest tests/test_end_to_end.py

A test module takes them by `pytest_plugins = ["tiny_run"]`. A test that wants to change a file copies it first.
"""

from pathlib import Path

import pytest
from helpers import TINY_REWARD, TINY_TRAIN, make_corpus, make_text, prepare_options, succeed


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of some kilobytes, by characters."""
    return make_corpus(tmp_path_factory.mktemp("corpus") / "tiny_char", make_text(1000))


@pytest.fixture(scope="session")
def generator(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A generator that train.py trained for some steps."""
    out = tmp_path_factory.mktemp("train")
    succeed("train", dataset=corpus, out_dir=out, **TINY_TRAIN)
    return out / "model_checkpoint.pt"


@pytest.fixture(scope="session")
def reward_data(tmp_path_factory: pytest.TempPathFactory, corpus: Path, generator: Path) -> Path:
    """A reward dataset of the generator: 4 samples a block."""
    out = tmp_path_factory.mktemp("reward_data") / "dataset"
    succeed("prepare_reward_data", **prepare_options(corpus, generator, out))
    return out


@pytest.fixture(scope="session")
def reward_model(tmp_path_factory: pytest.TempPathFactory, generator: Path, reward_data: Path) -> Path:
    """A reward model of the generator."""
    path = tmp_path_factory.mktemp("reward_model") / "reward_model.pt"
    options = {"base_model_path": generator, "data_dir": reward_data, "output_path": path}
    succeed("train_reward_model", **options, **TINY_REWARD)
    return path


@pytest.fixture(scope="session")
def knowing(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A model of the corpus that knows far more of it than the generator does."""
    out = tmp_path_factory.mktemp("knowing")
    more = {"max_iters": 200, "eval_interval": 100, "batch_size": 32, "learning_rate": 2e-2, "optimizer": "muon"}
    succeed("train", dataset=corpus, out_dir=out, **{**TINY_TRAIN, **more})
    return out / "model_checkpoint.pt"


@pytest.fixture(scope="session")
def natural_model(tmp_path_factory: pytest.TempPathFactory, corpus: Path, generator: Path) -> Path:
    """The generator after some more steps."""
    out = tmp_path_factory.mktemp("natural")
    more = {"batch_size": 8, "max_iters": 20, "eval_interval": 10, "warmup_iters": 2, "optimizer": "muon"}
    succeed("train", dataset=corpus, out_dir=out, init_from=generator, device="cpu", **more)
    return out / "model_checkpoint.pt"


@pytest.fixture(scope="session")
def predictive_reward_model(
    tmp_path_factory: pytest.TempPathFactory, generator: Path, reward_data: Path, knowing: Path
) -> Path:
    """A reward model of the generator that predicts: a likelihood head on the knowing trunk."""
    path = tmp_path_factory.mktemp("predictive") / "reward_model.pt"
    options = {"base_model_path": generator, "data_dir": reward_data, "output_path": path, "device": "cpu"}
    succeed("train_reward_model", **options, natural_model_path=knowing)
    return path
