"""Odd texts: marks, encodings, odd names, empty files and copies end in success or a clear line,
never in a traceback.

python tests/campaign/run.py --parts odd_texts
"""

import random
from pathlib import Path

from helpers import make_text
from world import World, expect_refusal

ENCODINGS = ("utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1")
NAMES = ("a.txt", "B.TXT", "._a.txt", ".b/a.txt", "b/c/a b.txt", "é.txt", "\n.txt", "[a]*.txt")
TEXT = make_text(300)
TEXTS = (TEXT, TEXT + "你好。\n\n", TEXT + "é\u2028\ufeff\r", "\0", "")


def attempt(world: World, draw: random.Random, folder: Path) -> None:
    """prepare_text.py with a folder of such texts, or with one by its name, and a settings file of
    such an encoding."""
    names = draw.sample(NAMES, 2)
    for name in (*names, "../settings.py"):
        path = folder / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "block_size = 8\r\n" if name == "../settings.py" else draw.choice(TEXTS)
        path.write_bytes(text.encode(draw.choice(ENCODINGS), "replace"))
    path = draw.choice(["texts", f"texts/{names[0]}"])
    options = {
        "config": "settings.py",
        "out_dir": "out",
        "tokenization": "char",
        "train_split": 0.5,
    }
    expect_refusal("prepare_text", options, f"{path}:", folder, (0, 2), path)
