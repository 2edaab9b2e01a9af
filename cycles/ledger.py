"""The ledger of a run, cycles.json: what the run was asked to do, and a record of each stage.

python -c "import cycles.ledger as c; print(c.Ledger(c.Path('out/my_novel')).about['outcome'])"
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.files import read_json, reading_file, write_json

Record = Mapping[str, Any]


class Ledger:
    """The ledger in a folder, empty if the folder has none.

    `about` has the settings of the run; `planned`, its stages in order, each with the names of
    those that it needs; `finished`, the names of those that this run has made or found made; and
    `outcome`: unfinished, finished, or `failed in STAGE`. A record has name, kind, cycle, settings
    (`identity_of`) and, if it is made, `figures` and `seconds`, None if it was interrupted.
    Records of stages that this run has not reached stay in the file for later, but are not
    reported. Raise UserError if the file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "cycles.json"
        self.about: dict[str, Any] = {}
        self.records: dict[str, Record] = {}
        if self.path.is_file():
            contents = read_json(self.path)
            with reading_file(self.path, "use another --out_dir"):
                self.about = dict(contents["about"])
                self.records = {record["name"]: record for record in contents["stages"]}

    def write(self) -> None:
        """Write the file."""
        write_json(self.path, {"about": self.about, "stages": list(self.records.values())})

    def finished(self, kind: str = "") -> list[Record]:
        """Return the finished stages of a kind, or of all kinds, in the order of the plan."""
        records = [self.records[name] for name in self.about["finished"]]
        return [record for record in records if kind in ("", record["kind"])]
