"""Hostile files: what a checkpoint, a state, meta.pkl, a settings file or reward data contain is
never executed.

python tests/campaign/run.py --parts hostile
"""

import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import torch
from helpers import make_corpus, make_text, run, weights
from world import World, expect, expect_refusal


class Harmful:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.makedirs, (self.path,)


def harmful_checkpoint(source: Path, target: Path, marker: Path, draw: random.Random) -> None:
    """A checkpoint with a harmful object in one of its places, or as a bare pickle, or with weights
    of another size."""
    contents = torch.load(source, weights_only=True)
    place = draw.choice(
        ["model", "config", "training", "tokenization", "bare", "shape", "nan", "huge"]
    )
    if place == "bare":
        target.write_bytes(pickle.dumps(Harmful(marker)))
        return
    if place in ("shape", "nan"):
        name = draw.choice(sorted(contents["model"]))
        weight = contents["model"][name]
        contents["model"][name] = (
            weight.flatten()[:-1] if place == "shape" else weight * float("nan")
        )
    elif place == "huge":
        setattr(
            contents["config"],
            draw.choice(["n_layer", "n_embd", "vocab_size", "block_size"]),
            2**40,
        )
    else:
        contents[place] = (
            {**contents[place], "x": Harmful(marker)} if place != "config" else Harmful(marker)
        )
    torch.save(contents, target, _use_new_zipfile_serialization=draw.random() < 0.7)


def differing_ties(source: Path, target: Path, draw: random.Random) -> dict[str, torch.Tensor]:
    """Write a checkpoint, ours or in nanoGPT's form, whose embeddings differ; return its
    weights."""
    contents = torch.load(source, weights_only=True)
    name = draw.choice(["transformer.wte.weight", "lm_head.weight"])
    contents["model"][name] = contents["model"][name] + draw.random()
    if draw.random() < 0.5:
        contents["model_args"] = vars(contents.pop("config"))
    torch.save(contents, target)
    return contents["model"]


def attempt(world: World, draw: random.Random, folder: Path) -> None:
    """One hostile file in the place of one that a script reads, or a checkpoint with differing
    embeddings."""
    folder.mkdir()
    marker, bad, out = folder / "executed", folder / "bad", folder / "out"
    commands = world.commands(out)
    kinds = [
        "checkpoint",
        "checkpoint",
        "checkpoint",
        "meta",
        "settings",
        "reward_data",
        "state",
        "ties",
    ]
    kind = draw.choice(kinds)
    if kind == "ties":
        written = differing_ties(world.folder / "generator.pt", bad, draw)
        finished = run(
            "train.py", folder=folder, **{**commands["train"], "init_from": bad, "max_iters": 0}
        )
        expect(finished.status == 0, "ties:", finished.err[-500:])
        found = weights(out / "generator.pt")
        expect(
            all(torch.equal(found[name], written[name]) for name in written),
            "ties: weights were lost",
        )
        return
    if kind == "checkpoint":
        script, option = draw.choice(
            [
                ("sample", "checkpoint_path"),
                ("train", "init_from"),
                ("prepare_reward_data", "model_path"),
                ("train_reward_model", "base_model_path"),
                ("train_reward_model", "natural_model_path"),
                ("train_grpo", "base_model_path"),
                ("train_grpo", "reward_model_path"),
            ]
        )
        source = world.folder / (
            "reward_model.pt" if option == "reward_model_path" else "generator.pt"
        )
        bad = bad.with_suffix(".pt")
        harmful_checkpoint(source, bad, marker, draw)
        options = {**commands[script], option: bad}
        shape = ("n_layer", "n_head", "n_embd", "block_size") if option == "init_from" else ()
        options = {name: value for name, value in options.items() if name not in shape}
    elif kind == "meta":
        script, options = draw.choice(["train", "evaluate"]), {}
        corpus = make_corpus(bad, make_text(1000))
        (corpus / "meta.pkl").write_bytes(
            pickle.dumps({"stoi": Harmful(marker), "itos": {}, "vocab_size": 3})
        )
        options = {**commands[script], "dataset": corpus}
    elif kind == "settings":
        script, text = draw.choice(sorted(commands)), f"import os; os.makedirs({str(marker)!r})"
        bad.write_text(draw.choice([text, f"seed = __import__('os').makedirs({str(marker)!r})"]))
        options = {**commands[script], "config": bad}
    elif kind == "reward_data":
        script, options = "train_reward_model", {**commands["train_reward_model"], "data_dir": bad}
        shutil.copytree(world.folder / "rewards", bad)
        path = bad / draw.choice(["train_x.bin", "val_y.bin", "train_metadata.txt"])
        data = path.read_bytes()
        path.write_bytes(draw.choice([data[:-3], data + b"\0" * 6, b"\xff" * len(data), b""]))
    else:
        script, options = "train", {**commands["train"], "init_from": "resume"}
        out.mkdir()
        torch.save({"step": 1, "parts": Harmful(marker)}, out / "generator.resume")
    expect_refusal(script, options, f"{kind}, {script}:", folder)
    expect(not marker.exists(), f"{kind}, {script}: a file's contents were executed")
