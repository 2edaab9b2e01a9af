"""Export a generator as a folder in Hugging Face's form, with its tokenizer.

python -m interop.export --checkpoint_path logs/model_checkpoint.pt --output_dir hf_model
"""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from common.files import atomic_folder, write_text
from common.log import print0
from common.process import require, run_main
from common.settings import Settings, parse_settings, setting
from lm.checkpoint import build_model, choose_tokenizer, load_checkpoint
from lm.huggingface import load_transformers, their_model

END = "<|endoftext|>"  # the token that ends a text, if the vocabulary has it
ABOUT = """# A generator of Crossover

It continues text: it has no chat template.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
    tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
    ids = tokenizer("To be", return_tensors="pt").input_ids
    print(tokenizer.decode(model.generate(ids, max_new_tokens=20)[0]))

- **Length.** Prompt and completion together fit into {length} tokens; cut longer texts before.
- **End of a text.** Its token: {end}. Without one, generation ends at `max_new_tokens`. TRL demands
  one; `CrossoverReward` and `CrossoverTrainer` add an id that the model cannot write.
- **Padding.** There is no padding token. For several prompts at once set
  `tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)` and `tokenizer.padding_side = "left"`,
  and pass the attention mask.
- **Unknown characters.** A tokenizer of characters knows only those of its corpus: others raise an
  error. Byte pairs know every text.
- **Sampling.** `generate` samples from the whole distribution at temperature 1.
- **What else reads it**: scripts of Crossover, as a checkpoint, and TRL.
"""


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
        write_text(
            partial / "README.md",
            ABOUT.format(
                length=checkpoint["config"].block_size,
                end=their_tokenizer.eos_token,
            ),
        )
    print0(f"Saved {output_dir}")


if __name__ == "__main__":
    run_main(main)
