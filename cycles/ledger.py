"""The ledger of a run, cycles.json: what the run was asked to do, and a record of each stage.

python -c "import cycles.ledger as c; print(c.Ledger(c.Path('out/my_novel')).outcome)"
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import read_json, reading, write_json

Record = Mapping[str, Any]
ARTEFACTS = {  # what a stage of each kind makes: a file, or the folder of reward data
    "base": "base_model_v1.pt",
    "natural_model": "natural_model_v1.pt",
    "reward_data": "reward_data_v{cycle}",
    "reward_model": "reward_model_v{cycle}.pt",
    "policy": "base_model_v{next}.pt",
    "evaluation": "evaluation_v{next}.json",
    "control_plain": "control_plain_v{next}.pt",
    "control_sampled": "control_sampled_v{next}.pt",
    "control_distil": "control_distil_v{next}.pt",
    "controls": "controls_v{next}.json",
}


def artefact(kind: str, cycle: int) -> str:
    """Return the name of what a stage of this kind makes in a cycle; cycles count from 1."""
    return ARTEFACTS[kind].format(cycle=cycle, next=cycle + 1)


class Ledger:
    """The ledger in a folder, empty if the folder has none.

    `about` has the settings of the run and `planned`, the names of its stages in order. `outcome`
    is unfinished, finished, or `failed in STAGE`. A record has name, kind, cycle, script, settings,
    and the hashes of inputs; the record of a finished stage also has `seconds` and `figures`.
    Records of stages that are not planned stay in the file, for a later run with more stages, but
    are not reported. Raise UserError if the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "cycles.json"
        self.about: dict[str, Any] = {"planned": []}
        self.outcome = "unfinished"
        self.records: dict[str, Record] = {}
        if not self.path.is_file():
            return
        contents = read_json(self.path)
        with reading(self.path, "use another --out_dir"):
            self.about = contents["about"]
            self.outcome = contents["outcome"]
            self.records = {record["name"]: record for record in contents["stages"]}

    def write(self) -> None:
        """Write the file."""
        stages = list(self.records.values())
        write_json(self.path, {"about": self.about, "outcome": self.outcome, "stages": stages})

    def record(self, record: Record) -> None:
        """Write the record of a stage; it replaces an earlier one of this name."""
        self.records[record["name"]] = record
        self.write()

    def finished(self, kind: str = "") -> list[Record]:
        """Return the finished stages of a kind, or of all kinds, in the order of the plan."""
        found = []
        for name in self.about["planned"]:
            record = self.records.get(name, {})
            if "seconds" in record and kind in ("", record["kind"]):
                found.append(record)
        return found

    def figures(self, name: str) -> dict[str, Any]:
        """Return the figures of a finished stage, or {} for any other stage."""
        if name not in self.about["planned"]:
            return {}
        return self.records.get(name, {}).get("figures", {})
