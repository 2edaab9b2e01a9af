"""What decides a result: the settings of a script, with hashes of what they read.

    python -c "from lm.identity import *; print(hash_input('README.md', 'file'))"

A run that is resumed, a stage of run_cycles.py and a reader of detect.py compare it with what they
have saved.
"""

from dataclasses import fields
from typing import Any

from common.files import dataset_folder, hash_file
from lm.checkpoint import hash_model


def identity_of(settings: Any, is_run: bool = False) -> dict[str, Any]:
    """Return what decides a result: the settings, with hashes in place of what they read.

    `common.settings.setting` says which settings count. is_run: without those that a resumed run
    may change. A user's function also has the hash of its file, by its name.
    """
    identity = {}
    for member in fields(settings):
        rules = member.metadata
        if rules.get("free") or (is_run and rules.get("changeable")):
            continue
        value = getattr(settings, member.name)
        kind = rules.get("reads", rules.get("model_file"))
        if kind == "function":
            for name in value or ():
                identity[name] = hash_file(name.rpartition(":")[0])
        elif kind is not None:
            names = value if isinstance(value, tuple) else (value,)
            value = " ".join(hash_input(name, kind) for name in names)
        identity[member.name] = value
    return identity


def hash_input(name: Any, kind: str) -> str:
    """Return the hash of a file, model or dataset.

    A setting without a name, and the values of init_from that name no file, stand for themselves.
    """
    if name in (None, "", "scratch", "resume"):
        return str(name)
    if kind == "dataset":
        return hash_model(dataset_folder(name))
    return hash_model(name)
