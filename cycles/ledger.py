"""The ledger of a run, cycles.json: what the run was asked to do, and a record of each stage.

python -c "import cycles.ledger as c; print(c.Ledger(c.Path('out/my_novel')).outcome)"
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import read_json, reading, write_json

Record = Mapping[str, Any]
SUFFIXES = {"reward_data": "", "evaluation": ".json", "controls": ".json"}  # of others: .pt


def artefact(kind: str, cycle: int) -> str:
    """Return the name of the file or folder that a stage of this kind makes in a cycle.

    The stages before the first cycle are those of cycle 0. Reward data and reward models have the
    version of the generator that they judge, everything else that of the cycle's policy.
    """
    name = kind
    version = cycle + 1
    if kind in ("base", "policy"):
        name = "base_model"
    elif kind in ("reward_data", "reward_model"):
        version = cycle
    return f"{name}_v{version}{SUFFIXES.get(kind, '.pt')}"


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
