"""Make the corpora that a run needs and that are missing.

python run_cycles.py --config config/shakespeare_library_cpu.py
"""

import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.files import read_json
from common.process import require, run_child, warn
from common.settings import read_config
from corpus.encode import TITLES_FILE, prepare_shakespeare
from data_loader import dataset_folder

# The sections of a settings file for prepare.py, and the settings that name their corpora. The
# natural corpus comes first, because the other one may use its tokenizer.
CORPORA = {"prepare_natural": "natural_dataset", "prepare": "dataset"}


def prepare_corpora(
    datasets: Mapping[str, str], config_path: str | None, words: Mapping[str, Sequence[str]]
) -> None:
    """Make the missing ones of `datasets`, a name or path for each setting of CORPORA.

    The prepare.py of a folder makes its corpus. For the corpus that the settings file names, it
    gets the section for it and the words of the command line; without a prepare.py of its own, it
    becomes one of Shakespeare. No corpus is made for another name, which may be a typing error.
    """
    contents = {}
    if config_path:
        contents = read_config(config_path)
    for section, name in CORPORA.items():
        named = contents.get("run_cycles", {}).get(name)
        is_named = section in contents and named == datasets[name]
        require(
            is_named or section not in words,
            f"--{section}.OPTION is for a corpus that the settings file names and has a section "
            f"for, which {datasets[name]} is not: leave it out",
        )
        if name == "natural_dataset" and datasets[name] == datasets["dataset"]:
            continue  # one corpus for both
        folder = dataset_folder(datasets[name])
        script = folder / "prepare.py"
        options = []
        if is_named:
            options = [f"--config={config_path}", f"--section={section}", f"--out_dir={folder}"]
            options += words.get(section, ())
        if (folder / "train.bin").is_file() and (folder / "val.bin").is_file():
            if section in words:
                warn(
                    f"--{section}.OPTION has no effect: {folder} is used as it is, because it "
                    "exists; remove its train.bin to make it again"
                )
        elif script.is_file():
            run_child("corpus", [sys.executable, str(script), *options])
        else:
            require(
                is_named,
                f"{folder} has no train.bin and val.bin, nor a prepare.py: choose another "
                "--dataset, or make it with prepare_text.py",
            )
            # In this process: another one would need seconds to start.
            prepare_shakespeare("char" if "char" in folder.name else "bpe", folder, options)


def corpus_titles(
    texts: Mapping[str, Mapping[str, Path]], datasets: Mapping[str, str]
) -> dict[str, list[str]]:
    """Return the titles of the training texts of each of `datasets`.

    texts: the user's texts of each by hash, from `find_texts`. Titles are the names of their files,
    or the documents that Shakespeare's prepare.py was given. A corpus of unknown texts has its own
    name.
    """
    titles = {}
    for name, dataset in datasets.items():
        found = [path.stem for path in texts[name].values()]
        file = dataset_folder(dataset) / TITLES_FILE
        if not found and file.is_file():
            found = [string.capwords(title) for title in read_json(file)]
        titles[name] = found or [Path(dataset).name]
    return titles
