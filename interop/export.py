"""Export a generator as a folder in Hugging Face's form, with its tokenizer.

python -m interop.export --checkpoint_path logs/model_checkpoint.pt --output_dir hf_model
"""

from dataclasses import dataclass
from pathlib import Path

from common.files import atomic_folder, write_text
from common.log import print0
from common.process import UserError, run_main
from common.settings import Settings, parse_settings, setting
from training.checkpoint import build_model, choose_tokenizer, load_checkpoint
from training.huggingface import load_transformers, their_model


@dataclass
class ExportSettings(Settings):
    """Export a generator in Hugging Face format."""

    checkpoint_path: str | None = setting(None, model_file="required")
    """checkpoint of the generator (required)"""
    output_dir: str = "hf_model"
    """new folder to write"""
    meta_path: str | None = None
    """meta.pkl or tokenizer.json of the generator; None: the tokenizer in the checkpoint"""


def main() -> None:
    settings = parse_settings(ExportSettings, "export")
    transformers = load_transformers()
    path = str(settings.checkpoint_path)
    output_dir = Path(settings.output_dir).resolve()
    if output_dir.exists():
        raise UserError(
            f"ERROR: output_dir={output_dir} already exists: remove it, or choose another"
        )
    checkpoint = load_checkpoint(path)
    tokenizer = choose_tokenizer(checkpoint, settings.meta_path)
    state = build_model(checkpoint, path).state_dict()

    with atomic_folder(output_dir) as partial:
        tokenizer_path = partial / "tokenizer.json"
        write_text(tokenizer_path, tokenizer.to_tokenizer_json())
        fast_tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_path))
        if "<|endoftext|>" in fast_tokenizer.get_vocab():
            fast_tokenizer.eos_token = "<|endoftext|>"
        fast_tokenizer.save_pretrained(partial)
        eos_token_id = fast_tokenizer.eos_token_id
        model = their_model(
            checkpoint["config"],
            state,
            crossover={"data": checkpoint["data"], "chars": tokenizer.chars},
            bos_token_id=None,
            eos_token_id=eos_token_id,
        )
        # Sample from the whole distribution; transformers would take the 50 likeliest tokens.
        model.generation_config = transformers.GenerationConfig(
            do_sample=True, top_k=0, eos_token_id=eos_token_id
        )
        model.save_pretrained(partial)
    print0(f"Saved {output_dir}")


if __name__ == "__main__":
    run_main(main)
