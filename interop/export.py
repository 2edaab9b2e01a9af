"""Export a generator as a folder in Hugging Face's form, with its tokenizer.

python -m interop.export --checkpoint_path logs/model_checkpoint.pt --output_dir hf_model
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from common.files import lock_output, write_text
from common.log import print0
from common.process import UserError, run_main
from common.settings import Settings, parse_settings, setting
from interop.huggingface import load_transformers, their_model
from training.checkpoint import build_model, load_checkpoint
from training.lineage import choose_tokenizer


@dataclass
class ExportSettings(Settings):
    """Write a generator in Hugging Face's form."""

    checkpoint_path: str | None = setting(None, model_file="required")
    """the generator (required)"""
    output_dir: str = setting("hf_model", output="folder")
    """the folder to make"""
    meta_path: str | None = None
    """meta.pkl with the characters, or a tokenizer.json; None: as the checkpoint says"""


def main() -> None:
    settings, transformers = parse_settings(ExportSettings, "export"), load_transformers()
    path, final = str(settings.checkpoint_path), Path(settings.output_dir).resolve()
    lock_output(final)
    if final.exists():
        raise UserError(f"ERROR: output_dir={final} is there already: remove it, or name another")
    checkpoint = load_checkpoint(path)
    tokenizer = choose_tokenizer(checkpoint, path, "auto", settings.meta_path)
    state, partial = (
        build_model(checkpoint, "generator", path).state_dict(),
        final.with_name(f".{final.name}.partial"),
    )
    shutil.rmtree(partial, ignore_errors=True)  # of an export that was killed
    write_text(partial / "tokenizer.json", tokenizer.to_tokenizer_json())
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(partial / "tokenizer.json"))
    fast.eos_token = "<|endoftext|>" if "<|endoftext|>" in fast.get_vocab() else None
    fast.save_pretrained(partial)
    further = {
        "crossover": {"data": checkpoint["data"]},
        "bos_token_id": None,
        "eos_token_id": fast.eos_token_id,
    }
    model = their_model(checkpoint["config"], state, **further)
    # The distribution that the model was trained to have; transformers would else take the 50
    # likeliest tokens.
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, top_k=0, eos_token_id=fast.eos_token_id
    )
    model.save_pretrained(partial)
    partial.rename(final)
    print0(f"Saved {final}")


if __name__ == "__main__":
    run_main(main)
