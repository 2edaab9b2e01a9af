"""Export a generator as a folder in Hugging Face's form, with its tokenizer.

python -m interop.export --checkpoint_path logs/model_checkpoint.pt --output_dir hf_model
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from common.files import atomic_folder
from common.log import print0
from common.process import require, run_main
from common.settings import Settings, parse_settings, setting
from lm.checkpoint import build_model, choose_tokenizer, load_checkpoint
from lm.huggingface import load_transformers, their_model

END = "<|endoftext|>"  # the token that ends a text, if the vocabulary has it


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
    require(
        not output_dir.exists(),
        f"output_dir={output_dir} already exists: remove it, or choose another",
    )
    checkpoint = load_checkpoint(path)
    tokenizer = choose_tokenizer(checkpoint, settings.meta_path)
    state = build_model(checkpoint, path).state_dict()

    library = Tokenizer.from_str(tokenizer.to_tokenizer_json())
    their_tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=library)
    if library.token_to_id(END) is not None:
        their_tokenizer.eos_token = END
    eos_token_id = their_tokenizer.eos_token_id
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
    with atomic_folder(output_dir) as partial:
        their_tokenizer.save_pretrained(partial)
        model.save_pretrained(partial)
    print0(f"Saved {output_dir}")


if __name__ == "__main__":
    run_main(main)
