"""Checkpoints: files with the weights of a model, its config, its tokenizer and its history.

    python -c "import training.checkpoint as c; print(c.load_checkpoint('logs/model.pt')['config'])"

A checkpoint is a dict. All records but the first two may be None:

    model             the state dict
    config            GPTConfig
    tokenization      the result of TokenizationManager.to_record()
    data              sizes and hashes of the corpus: see data_loader.data_record
    training          settings and metrics of the training run
    generator_config  GPTConfig of the generator in a likelihood reward model
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.files import is_hub_name, load_state, reading, save_state
from common.process import is_main_rank, require, warn
from model import GPT, GPTConfig
from tokenization_manager import TokenizationManager

RECORDS = ("tokenization", "data", "training", "generator_config")
CHECKED_ENTRIES = (
    ("data", "train_sha256", str),
    ("data", "val_sha256", str),
    ("training", "generator_sha256", str | None),
    ("training", "batches", int | None),
    ("training", "skill", dict | None),
)
# Former fields of GPTConfig, and their defaults: other values are refused.
REMOVED_FIELDS = {
    "rotary_share": 1.0,
    "parallel_residual": False,
    "trunk_layer": None,
    "reads_previous": False,
}
Record = Mapping[str, Any]


def save_checkpoint(
    path: Path, model: Any, tokenization: Record | None, data: Record | None, training: Record
) -> None:
    """Write the checkpoint of a GPT or RewardModel atomically, on rank 0 only.

    The records may hold only plain values.
    """
    if not is_main_rank():
        return
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    contents = {
        "model": weights,
        "config": replace(model.config),
        "tokenization": tokenization,
        "data": data,
        "training": dict(training),
    }
    if hasattr(model, "generator"):  # a likelihood head
        contents["generator_config"] = replace(model.generator.config)
    save_state(path, contents)
    path.with_suffix(".sampling.json").unlink(missing_ok=True)  # of earlier weights


def find_model(name: str | Path) -> Path:
    """Return the file or folder of a model; download it if `name` is one of GPT-2's names."""
    if not is_hub_name(str(name)):
        return Path(name)
    from interop.huggingface import download_model  # only needed for such names

    return download_model(str(name))


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read and check a checkpoint; missing records are None.

    `path` is a Crossover or nanoGPT file, a folder of GPT-2 or of our export, or one of GPT-2's
    names. Raise UserError for anything else. Nothing in a file is executed.
    """
    path = find_model(path)
    if path.is_dir():
        from interop.huggingface import read_folder  # only needed for folders

        contents = read_folder(path)
    else:
        contents = load_state(path)
    with reading(path):
        return checked_contents(contents)


def checked_contents(contents: Record) -> dict[str, Any]:
    """Return the checked records of a checkpoint that was read from a file."""
    if "model_args" in contents:
        contents = convert_nanogpt(contents)
    checked: dict[str, Any] = {name: contents.get(name) for name in RECORDS}
    weights = dict(contents["model"])
    for name, tensor in weights.items():
        check_tensor(name, tensor)
    checked["model"] = weights
    checked["config"] = check_config(contents["config"], weights, ("", "natural."))
    if checked["generator_config"] is not None:
        checked["generator_config"] = check_config(
            checked["generator_config"], weights, ("generator.",)
        )
    if checked["tokenization"] is not None:
        TokenizationManager.from_record(checked["tokenization"])  # raises if it is invalid
    for record_name, name, kind in CHECKED_ENTRIES:
        record = checked[record_name]
        if record is not None:
            require(isinstance(record.get(name), kind), f"invalid {name}")
    return checked


def convert_nanogpt(contents: Record) -> dict[str, Any]:
    """Convert a nanoGPT checkpoint to a Crossover checkpoint."""
    weights = {}
    for name, tensor in contents["model"].items():
        # Old versions of nanoGPT store the causal mask; torch.compile adds a prefix.
        if not name.endswith(".attn.bias"):
            weights[name.removeprefix("_orig_mod.")] = tensor
    return {"model": weights, "config": {"position": "learned", **contents["model_args"]}}


def check_tensor(name: Any, tensor: Any) -> None:
    """Raise UserError unless an entry of a state dict is a tensor of finite floats."""
    is_float = isinstance(tensor, Tensor) and tensor.is_floating_point()
    require(is_float, f"{name} is not a tensor of floats")
    require(bool(tensor.isfinite().all()), f"{name} holds NaN or infinite values")


def check_config(
    config: Any, weights: Mapping[str, Tensor], prefixes: tuple[str, ...]
) -> GPTConfig:
    """Return a config from a file as a new GPTConfig; raise UserError if it is invalid.

    prefixes: what the names of the model's weights may begin with.
    """
    # Rebuild the config field by field: a loaded object may carry arbitrary attributes.
    values = dict(config if isinstance(config, dict) else vars(config))
    for name, default in REMOVED_FIELDS.items():
        value = values.pop(name, default)
        require(value == default, f"{name}={value!r:.60}: commit 6e0f3b4 reads it last")
    is_position_head = values.get("reward_head_type") == "position"
    require(not is_position_head, "reward_head_type='position': commit 6e0f3b4 reads it last")
    config = GPTConfig(**values)
    problem = config.problem()
    require(problem is None, f"invalid config: {problem}")
    # A wrong size could make a model that fills the memory.
    num_weights = sum(tensor.numel() for tensor in weights.values())
    require(
        config.n_layer <= len(weights) and config.min_weights <= num_weights,
        f"it has {num_weights:,} weights, but its config needs {config.min_weights:,} or more",
    )
    for prefix in prefixes:
        names = (f"{prefix}transformer.wte.weight", f"{prefix}lm_head.weight")
        embeddings = [weights[name] for name in names if name in weights]
        if config.tied_embeddings and len(embeddings) == 2 and not torch.equal(*embeddings):
            warn(f"{' and '.join(names)} differ, although the config ties them: both are kept")
            config.tied_embeddings = False
    return config


def build_model(contents: Record, path: str | Path = "", device: torch.device | str = "cpu") -> GPT:
    """Return the generator of a loaded checkpoint in eval mode; raise UserError for a reward model.

    reward.heads.build_reward_model builds reward models with any head.
    """
    check_mode(contents, "generator", path)
    model = GPT(contents["config"])
    load_weights(model, contents, path)
    return model.to(device).eval()


def check_mode(contents: Record, mode: str, path: str | Path) -> None:
    """Raise UserError unless a loaded checkpoint holds a model of this mode."""
    found = contents["config"].mode
    require(found == mode, f"{path} holds a {found} model, not a {mode} model")


def load_weights(model: nn.Module, contents: Record, path: str | Path) -> None:
    """Load a checkpoint's weights; raise UserError if their names or shapes differ."""
    with reading(path):
        model.load_state_dict(contents["model"])
