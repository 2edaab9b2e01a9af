"""Make the corpora that a run needs and that are missing.

python run_cycles.py --config config/shakespeare_library_cpu.py
"""

import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.process import UserError, run_child
from common.settings import parse_settings, read_config
from corpus.encode import ShakespeareSettings
from data_loader import dataset_folder

DATA = Path(__file__).resolve().parents[1] / "data"
# The sections of a settings file for prepare.py, and the settings that name their corpora. The
# natural corpus comes first, because the other one may use its tokenizer.
CORPORA = {"prepare_natural": "natural_dataset", "prepare": "dataset"}


def prepare_corpora(
    datasets: Mapping[str, str], config_path: str | None, words: Mapping[str, Sequence[str]]
) -> None:
    """Make the missing ones of `datasets`, a name or path for each setting of CORPORA.

    The prepare.py of a folder makes its corpus. For the corpus that the settings file names, it
    gets the section for it and the words of the command line; without a prepare.py of its own, that
    of Shakespeare is run. No corpus is made for another name, which may be a typing error.
    """
    contents = {}
    if config_path:
        contents = read_config(config_path)
    for section, name in CORPORA.items():
        if name == "natural_dataset" and datasets[name] == datasets["dataset"]:
            continue  # one corpus for both
        folder = dataset_folder(datasets[name])
        if (folder / "train.bin").is_file() and (folder / "val.bin").is_file():
            continue
        script = folder / "prepare.py"
        options = []
        if section in contents and contents.get("run_cycles", {}).get(name) == datasets[name]:
            options = [f"--config={config_path}", f"--section={section}", f"--out_dir={folder}"]
            options += words.get(section, ())
            if not script.is_file():
                corpus = "shakespeare_char" if "char" in folder.name else "shakespeare"
                script = DATA / corpus / "prepare.py"
        if not script.is_file():
            known = sorted(path.parent.name for path in Path("data").glob("*/train.bin"))
            raise UserError(
                f"ERROR: {folder} has no train.bin and val.bin, nor a prepare.py: choose another "
                f"--dataset (data/ has {', '.join(known) or 'none'}), or use prepare_text.py"
            )
        run_child("corpus", [sys.executable, str(script), *options])


def corpus_titles(
    texts: Mapping[str, Mapping[str, Path]],
    datasets: Mapping[str, str],
    config_path: str | None,
    words: Mapping[str, Sequence[str]],
) -> dict[str, list[str]]:
    """Return the titles of the training texts of each of `datasets`.

    texts: the user's texts of each by hash, from `find_texts`. Titles are the names of their files,
    or the documents that prepare.py gets for the corpus that the settings file names. A corpus of
    unknown texts has its own name.
    """
    contents = {}
    if config_path:
        contents = read_config(config_path)
    titles = {}
    for section, name in CORPORA.items():
        found = [path.stem for path in texts[name].values()]
        if not found and contents.get("run_cycles", {}).get(name) == datasets[name]:
            options = [f"--config={config_path}", f"--section={section}", *words.get(section, ())]
            found = [string.capwords(title) for title in training_documents(options)]
        titles[name] = found or [Path(datasets[name]).name]
    return titles


def training_documents(options: list[str]) -> tuple[str, ...]:
    """Return the train_documents of the Shakespeare prepare.py's options, () for another script."""
    try:
        settings = parse_settings(ShakespeareSettings, "prepare", options, check=False)
    except UserError:
        return ()
    return settings.train_documents
