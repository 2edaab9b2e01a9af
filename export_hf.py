"""Writes a generator in Hugging Face's form: a folder for transformers, TRL and vLLM.

    python export_hf.py --checkpoint_path logs/model_checkpoint.pt --output_dir hf_model

In: a generator's checkpoint, ours or nanoGPT's, with its tokenizer in it or named. Out, in output_dir: config.json,
model.safetensors, generation_config.json, a tokenizer that AutoTokenizer loads, and a model card (README.md). A model
with learned positions has GPT-2's form, one with rotary positions GPT-NeoX's. Embeddings of padding ids, which no
tokenizer makes, are left out.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from safetensors import SafetensorError
from safetensors.torch import save_file

from interop.huggingface import CONFIG_FILE, WEIGHTS_FILE, config_json, form_of, their_weights
from model import GPTConfig
from runtime.cli import parse_settings
from runtime.files import HASHES_FILE, hash_lines, publish_directory, write_json, write_text
from runtime.output_lock import hold_output
from runtime.process import UserError, run_main
from runtime.run_log import format_size, say
from runtime.settings import Settings, setting
from tokenization_manager import END_OF_TEXT, TOKENIZER_FILE, TokenizationManager
from training.checkpoint import build_model, choose_tokenizer, hash_model, load_checkpoint

CONTENTS = (CONFIG_FILE, WEIGHTS_FILE, "generation_config.json", TOKENIZER_FILE, "tokenizer_config.json", "README.md")
FILES = (*CONTENTS, HASHES_FILE)
FORM_TITLES = {"gpt2": "GPT-2", "gpt_neox": "GPT-NeoX"}
RECORD_LIMIT = 200  # characters of a value that the model card repeats


@dataclass
class ExportSettings(Settings):
    """Write a generator in Hugging Face's form."""

    GROUPS: ClassVar[dict[str, str]] = {"files": "checkpoint_path", "tokenizer": "tokenization"}

    checkpoint_path: str | None = setting(None, model_file="required")
    """the generator (required)"""
    output_dir: str = setting("hf_model", output="folder")
    """the folder to make"""
    overwrite: bool = False
    """replace an earlier export in output_dir"""
    tokenization: Literal["auto", "bpe", "char", "tokenizer"] = "auto"
    """auto: as the checkpoint says, or as the file at meta_path is; a checkpoint from elsewhere may say nothing"""
    meta_path: str | None = setting(None, belongs_to={"tokenization": ("auto", "char", "tokenizer")})
    """meta.pkl with the characters, or a tokenizer.json"""


def main() -> None:
    settings = parse_settings(ExportSettings, "export_hf")
    assert settings.checkpoint_path is not None  # checked with the settings
    # Resolved: a link keeps what it leads to, and `.` has a name.
    path, final = settings.checkpoint_path, Path(settings.output_dir).resolve()
    check_place(final, settings.overwrite)
    checkpoint = load_checkpoint(path)
    tokenizer = choose_tokenizer(checkpoint, path, settings.tokenization, settings.meta_path)
    model = build_model(checkpoint, "generator", path)
    config = model.config
    try:
        form = form_of(config)
    except UserError as error:
        raise UserError(f"ERROR: {path}: {error}") from None
    if tokenizer.vocab_size != config.num_real_tokens:
        raise UserError(
            f"ERROR: {path} has {config.num_real_tokens} token ids and its tokenizer {tokenizer.vocab_size}: name the "
            "tokenizer that it was trained with (--tokenization, --meta_path)"
        )
    tokenizer_json = tokenizer.to_tokenizer_json()
    added = json.loads(tokenizer_json)["added_tokens"]
    end = {token["content"]: token["id"] for token in added}.get(END_OF_TEXT)

    hold_output(final)
    check_place(final, settings.overwrite)  # another export may have been there first
    staging = final.with_name(f".{final.name}.export.partial")
    shutil.rmtree(staging, ignore_errors=True)  # of an export that was killed
    staging.mkdir(parents=True)
    try:
        try:
            save_file(their_weights(config, model.state_dict()), staging / WEIGHTS_FILE, metadata={"format": "pt"})
        except SafetensorError as error:  # of a write, of which the system's error is a text in it
            raise UserError(f"ERROR: cannot write {final}: {error}") from None
        write_json(staging / CONFIG_FILE, config_json(config, end, checkpoint["data"]))
        ends = {"bos_token_id": end, "eos_token_id": end}
        # The distribution that the model was trained to have; transformers would else take the 50 likeliest tokens.
        write_json(staging / "generation_config.json", {"do_sample": True, "temperature": 1.0, "top_k": 0, **ends})
        write_text(staging / TOKENIZER_FILE, tokenizer_json)
        write_json(staging / "tokenizer_config.json", tokenizer_config(config, end))
        write_text(staging / "README.md", model_card(checkpoint, path, tokenizer, model.num_parameters()))
        write_text(staging / HASHES_FILE, hash_lines({name: staging / name for name in CONTENTS}))
        publish_directory(staging, final)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    say(f"{path}: {format_size(model.num_parameters())}, {tokenizer.info().describe()}, in {FORM_TITLES[form]}'s form")
    say(f"Saved {', '.join(FILES)} in {final}")


def check_place(folder: Path, overwrite: bool) -> None:
    """Raise UserError for a folder that holds other files than an export's, or an export that is to stay."""
    if not folder.is_dir() or not (names := sorted(path.name for path in folder.iterdir())):
        return
    if foreign := [name for name in names if name not in FILES]:
        raise UserError(f"ERROR: {folder} holds other files ({foreign[0]}); give the export its own --output_dir")
    if not overwrite:
        raise UserError(f"ERROR: {folder} holds an export; use --overwrite True to replace it, or another --output_dir")


def tokenizer_config(config: GPTConfig, end: int | None) -> dict[str, Any]:
    """The tokenizer_config.json: text is decoded as it is, without clean-up of spaces."""
    ends = {} if end is None else dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.block_size,
        "clean_up_tokenization_spaces": False,
        **ends,
    }


# ---------------------------------------------------------------------------------------------------------------------
# the model card


def model_card(checkpoint: Mapping[str, Any], path: str, tokenizer: TokenizationManager, num_parameters: int) -> str:
    """The model card, Markdown: shape, data, lineage and figures as the checkpoint records them."""
    config, data, training = checkpoint["config"], checkpoint["data"], checkpoint["training"] or {}
    settings = training.get("settings")
    sections = {
        "Model": {
            "form": FORM_TITLES[form_of(config)],
            "parameters": f"{num_parameters:,}",
            "layers, heads, width": f"{config.n_layer}, {config.n_head}, {config.n_embd}",
            "context": f"{config.block_size:,} tokens",
            "tokenization": tokenizer.info().describe(),
        },
        "Data": data or {"record": "none in the checkpoint"},
        "Lineage": {"checkpoint": path, "sha256": hash_model(path), **lineage_of(settings)},
        "Figures": dict(scalars(training, without="settings")) or {"record": "none in the checkpoint"},
        "Settings of the last training": dict(scalars(settings)) if isinstance(settings, dict) else {},
    }
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "---",
        "",
        f"# {cell(Path(path).stem)}",
        "",
    ]
    lines.append("Written by Crossover's export_hf.py from a checkpoint. Losses are in nats per token.")
    for title, rows in sections.items():
        if rows:
            lines += ["", f"## {title}", "", "| name | value |", "| --- | --- |"]
            lines += [f"| {cell(name)} | {cell(value)} |" for name, value in rows.items()]
    return "\n".join(lines) + "\n"


def lineage_of(settings: Any) -> dict[str, Any]:
    """The models and the corpus that the last training names."""
    names = ("init_from", "base_model_path", "reward_model_path", "dataset")
    return {name: settings[name] for name in names if name in settings} if isinstance(settings, dict) else {}


def scalars(record: Mapping[str, Any], without: str = "", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of a record's numbers and words, those of records within it with their place."""
    for name, value in record.items():
        if name == without:
            continue
        if isinstance(value, dict):
            yield from scalars(value, prefix=f"{prefix}{name}: ")
        elif isinstance(value, bool | int | float | str | None):
            yield f"{prefix}{name}", value


def cell(value: Any) -> str:
    """A value as text of a table's cell, on one line and without markup of its own."""
    shown = f"{value:.6g}" if isinstance(value, float) else str(value)
    shown = " ".join(shown.split())[:RECORD_LIMIT]
    for character in "\\`*|<>[]":
        shown = shown.replace(character, f"\\{character}")
    return shown


if __name__ == "__main__":
    run_main(main)
