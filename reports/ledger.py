"""The ledger of results, cycles.json: what a run was asked to do, and a record of each stage.

python -c "from pathlib import Path; from reports.ledger import Ledger; print(Ledger(Path('out')))"
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.files import read_json, reading, write_json
from common.process import require
from common.settings import differing_settings

Record = Mapping[str, Any]


class Ledger:
    """The ledger in a folder, empty if the folder has none.

    `about` has the settings of the run and `planned`, the names of its stages in order. A record
    has name, kind, cycle, script, settings, and the hashes of inputs; the record of a finished
    stage also has `seconds` and `figures`. Records of stages that are not planned stay in the file,
    for a later run with more stages, but are not reported. Raise UserError if the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "cycles.json"
        self.about: dict[str, Any] = {}
        self.outcome = "unfinished"
        self.records: dict[str, Record] = {}
        if not self.path.is_file():
            return
        contents = read_json(self.path)
        with reading(self.path, "use another --out_dir"):
            self.about = contents["about"]
            self.outcome = contents["outcome"]
            for record in contents["stages"]:
                self.records[record["name"]] = record
                _compared(record)

    def start(self, about: dict[str, Any]) -> None:
        """Begin a run; earlier records stay."""
        self.about = about
        self.outcome = "unfinished"

    def record(self, record: Record) -> None:
        """Write the record of a stage; it replaces an earlier one of this name."""
        self.records[record["name"]] = record
        self._write()

    def finish(self, stages: list[str]) -> None:
        """Note that the run is finished; only these stages were needed."""
        self.about["planned"] = stages
        self.outcome = "finished"
        self._write()

    def fail(self, name: str) -> None:
        """Note that a stage failed."""
        self.outcome = f"failed in {name}"
        self._write()

    def _write(self) -> None:
        stages = list(self.records.values())
        write_json(self.path, {"about": self.about, "outcome": self.outcome, "stages": stages})

    def finished(self, kind: str = "") -> list[Record]:
        """Return the finished stages of a kind, or of all kinds, in the order of the plan."""
        found = []
        for name in self.about.get("planned", ()):
            record = self.records.get(name, {})
            if "seconds" in record and kind in ("", record["kind"]):
                found.append(record)
        return found

    def figures(self, name: str) -> dict[str, Any]:
        """Return the figures of a finished stage, or {} for any other stage."""
        if name not in self.about.get("planned", ()):
            return {}
        return self.records.get(name, {}).get("figures", {})

    def difference(self, name: str, identity: Record) -> str:
        """Describe how script, settings and inputs differ from the record of a stage.

        Return "" if there is no record.
        """
        if name not in self.records:
            return ""
        return differing_settings(_compared(self.records[name]), _compared(identity))


def _compared(record: Record) -> dict[str, Any]:
    return {"script": record["script"], **record["settings"], **record["inputs"]}


def default_folder(sources: Sequence[str]) -> str:
    """Return out/ and the name of the first source; raise UserError if it holds a run of other
    sources.
    """
    folder = Path("out", Path(sources[0]).stem)
    earlier = Ledger(folder).about.get("sources", sources)
    require(
        list(map(os.path.abspath, earlier)) == list(map(os.path.abspath, sources)),
        f"{folder} holds a run of {', '.join(earlier)}, and this one is of "
        f"{', '.join(sources)}: choose another folder with --out_dir",
    )
    return str(folder)
