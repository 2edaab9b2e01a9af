"""Checkpoints: files with the weights of a model, its config, its tokenizer and its history.

    python -c "import lm.checkpoint as c; print(c.load_checkpoint('logs/model.pt')['config'])"

A checkpoint is a dict. All records but the first two may be None:

    model             the state dict
    config            GPTConfig
    tokenization      the result of TokenizationManager.to_record()
    data              sizes and hashes of the corpus: see data_loader.data_record
    training          settings and metrics of the training run
    generator_config  GPTConfig of the generator in a likelihood reward model
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.files import hash_bytes, hash_file, is_hub_name, load_state, reading_file, save_state
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
SPLITS = ("train_sha256", "val_sha256")  # entries of data records
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
        "config": model.config,
        "tokenization": tokenization,
        "data": data,
        "training": dict(training),
    }
    if hasattr(model, "generator"):  # a likelihood head
        contents["generator_config"] = model.generator.config
    save_state(path, contents)


def find_model(name: str | Path) -> Path:
    """Return the file or folder of a model; download it if `name` is one of GPT-2's names."""
    if not is_hub_name(str(name)):
        return Path(name)
    from lm.huggingface import download_model  # only needed for such names

    return download_model(str(name))


def hash_model(path: str | Path) -> str:
    """Return the sha256, in hexadecimal, of a checkpoint's file or of a Hugging Face folder.

    In a folder, only weights, configs and vocabularies count. A name of something
    that is not here stands for itself.
    """
    path = find_model(path)
    if not path.exists():
        return str(path)
    if path.is_file():
        return hash_file(path)
    hashes = ""
    for file in sorted(path.glob("*")):
        if file.suffix in (".bin", ".safetensors", ".json", ".pkl"):
            hashes += hash_file(file)
    return hash_bytes(hashes.encode())


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read and check a checkpoint. Those of RECORDS that the file lacks are None.

    `path` is a Crossover or nanoGPT file, a folder of GPT-2 or of our export, or one of GPT-2's
    names. Raise UserError for anything else. Nothing in a file is executed.
    """
    path = find_model(path)
    if path.is_dir():
        from lm.huggingface import read_folder  # only needed for folders

        contents = read_folder(path)
    else:
        contents = load_state(path)
    with reading_file(path):
        return checked_contents(contents)


def checked_contents(contents: Record) -> dict[str, Any]:
    """Return the checked records of a checkpoint that was read from a file."""
    if "model_args" in contents:
        contents = convert_nanogpt(contents)
    checked: dict[str, Any] = {name: contents.get(name) for name in RECORDS}
    weights = dict(contents["model"])
    for name, tensor in weights.items():
        is_finite = tensor.is_floating_point() and bool(tensor.isfinite().all())
        require(is_finite, f"{name} is not a tensor of finite floats")
    checked["model"] = weights
    checked["config"] = check_config(contents["config"], weights)
    if checked["generator_config"] is not None:
        checked["generator_config"] = check_config(checked["generator_config"], weights)
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
    return {"model": weights, "config": GPTConfig(position="learned", **contents["model_args"])}


def check_config(config: Any, weights: Mapping[str, Tensor]) -> GPTConfig:
    """Return a config from a file as a new GPTConfig that fits its weights.

    Raise UserError if it is invalid.
    """
    # Rebuild the config field by field: a loaded object may carry arbitrary attributes.
    values = dict(vars(config))
    for name, default in REMOVED_FIELDS.items():
        value = values.pop(name, default)
        require(value == default, f"{name}={value!r:.60}: commit 6e0f3b4 reads it last")
    config = GPTConfig(**values)
    problem = config.problem()
    require(problem is None, f"invalid config: {problem}")
    # A wrong size could make a model that fills the memory.
    num_weights = sum(tensor.numel() for tensor in weights.values())
    require(
        config.min_weights <= num_weights,
        f"it has {num_weights:,} weights, but its config needs {config.min_weights:,} or more",
    )
    # The config of GPT-2 or of a fork of nanoGPT can be wrong about this.
    head = weights.get("lm_head.weight")
    if head is not None and not torch.equal(head, weights["transformer.wte.weight"]):
        config.tied_embeddings = False
    return config


def build_model(contents: Record, path: str | Path = "", device: torch.device | str = "cpu") -> GPT:
    """Return the generator of a loaded checkpoint in eval mode; raise UserError for a reward model.

    reward.heads.build_reward_model builds reward models with any head.
    """
    is_generator = contents["config"].mode == "generator"
    require(is_generator, f"{path} holds a reward model, not a generator")
    return load_weights(GPT(contents["config"]), contents, path, device)


def load_weights(model: Any, contents: Record, path: str | Path, device: torch.device | str) -> Any:
    """Return a new model with a checkpoint's weights, on a device, in evaluation mode.

    Raise UserError if names or shapes of the weights differ.
    """
    with reading_file(path):
        model.load_state_dict(contents["model"])
    return model.to(device).eval()


def check_fit(ours: Record, theirs: Record, our_name: str, their_name: str) -> None:
    """Raise UserError unless two loaded checkpoints have the same tokens and sizes.

    Tokens are compared if both record their tokenization.
    """
    their_facts = facts_of(theirs)
    for name, value in facts_of(ours).items():
        other = their_facts.get(name, value)
        require(
            other == value,
            f"{name} is {value} in {our_name} and {other} in {their_name}: they do not match; use "
            "models and data of the same tokenization and size (--dataset, --meta_path)",
        )


def facts_of(contents: Record) -> dict[str, Any]:
    """Return what models that are used together have in common, as far as it is known."""
    sizes = ("vocab_size", "num_real_tokens", "block_size")
    facts = {name: getattr(contents["config"], name) for name in sizes}
    if contents["tokenization"] is not None:
        facts["tokenization"] = TokenizationManager.from_record(contents["tokenization"]).identity()
    return facts


def check_tokenizer(contents: Record, tokenizer: TokenizationManager) -> None:
    """Raise UserError if a checkpoint's model reads tokens that differ from the tokenizer's."""
    expected = {**contents, "tokenization": tokenizer.to_record()}
    check_fit(expected, contents, "the data", "the model")
    tokens = tokenizer.describe()
    num_tokens = contents["config"].num_real_tokens
    require(
        tokenizer.vocab_size <= num_tokens,
        f"the data's vocabulary ({tokens}) exceeds the model's {num_tokens} tokens; "
        "use the data, or the --meta_path, of its training",
    )
    if contents["tokenization"] is None and tokenizer.vocab_size < num_tokens:
        warn(
            f"the model has {num_tokens} token ids, the data have fewer, {tokens}: "
            "make sure that they are the same"
        )


def check_splits(
    trained: Record | None,
    data: Record,
    name: str = "the model",
    hashes: Sequence[str] = SPLITS,
    is_allowed: bool = False,
) -> None:
    """Raise UserError, or warn if `is_allowed`, unless a model was trained on the splits of `data`.

    trained: the data record of the model's checkpoint; without one, warn. hashes: those of the
    splits that must be the same.
    """
    if trained is not None and all(trained[split] == data.get(split) for split in hashes):
        return
    problem = (
        f"{name} was trained on another train/validation split, or has no record of it: its "
        "training text may be validation text here"
    )
    require(is_allowed or trained is None, f"{problem}: use the data of its training")
    warn(problem)


def check_generator(name: str, recorded: str | None, path: str) -> str:
    """Return the hash of the generator in `path`; raise UserError if `name` was made with another.

    recorded: the hash of the generator with which `name` was made; without one, warn.
    """
    sha256 = hash_model(path)
    if recorded is None:
        warn(f"{name} does not record with which generator it was made")
        return sha256
    require(
        recorded == sha256,
        f"{name} was made with another generator (sha256 {recorded:.12}), not {path} "
        f"({sha256:.12}): use that generator, or make it again with this one",
    )
    return sha256


def choose_tokenizer(checkpoint: Record, meta_path: str | None) -> TokenizationManager:
    """Return the tokenizer in a file, else that in a checkpoint, else GPT-2's.

    Raise UserError if it does not fit the checkpoint.
    """
    if meta_path is None and checkpoint["tokenization"] is not None:
        tokenizer = TokenizationManager.from_record(checkpoint["tokenization"])
    else:
        tokenizer = TokenizationManager(meta_path=meta_path)
    check_tokenizer(checkpoint, tokenizer)
    return tokenizer
