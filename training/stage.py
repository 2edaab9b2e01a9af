"""A stage of run_cycles.py: one run of a script with all its settings, and what identifies it.

python run_cycles.py --config config/shakespeare_library_cpu.py
"""

import json
import sys
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from common.files import read_json
from training.checkpoint import load_checkpoint
from training.lineage import hash_inputs

ROOT = Path(__file__).resolve().parents[1]
# The settings that name the artefact
OUTPUTS = ("out_dir", "checkpoint_name", "output_dir", "output_path")
# The settings that do not change the artefact.
NOT_COMPARED = ("device", "overwrite", "tracker", "wandb_log", "wandb_project", "wandb_run_name")


@dataclass(frozen=True)
class Stage:
    """One run of a script, which makes an artefact; without a script, a copy of `source`.

    `settings` are all settings of the script, those of a section changed by `options`.
    """

    kind: str
    cycle: int
    artefact: Path
    section: str = ""
    script: str = ""
    settings: Any = None
    source: str = ""

    @property
    def name(self) -> str:
        return self.artefact.stem

    def identity(self) -> dict[str, Any]:
        """Return what determines the artefact: script, settings, and hashes of the inputs."""
        settings = asdict(self.settings) if self.script else {"base_model_path": self.source}
        for name in (*OUTPUTS, *NOT_COMPARED):
            settings.pop(name, None)
        hashes = hash_inputs(settings)
        for name in hashes:
            settings.pop(name, None)
        # The ledger is JSON, which turns tuples into lists.
        settings = json.loads(json.dumps(settings))
        return {"script": self.script, "settings": settings, "inputs": hashes}

    def command(self, **changes: Any) -> list[str]:
        """Return the command line of the script, with some settings changed."""
        words = [sys.executable, str(ROOT / f"{self.script}.py")]
        settings = replace(self.settings, **changes)
        for member in fields(settings):
            value = getattr(settings, member.name)
            if isinstance(value, tuple) and value:
                words += [f"--{member.name}", *map(str, value)]
            elif value != member.default:
                words.append(f"--{member.name}={value}")  # one word: it may begin with dashes
        return words

    def figures(self) -> dict[str, Any]:
        """Read the figures of the finished stage."""
        if self.script == "evaluate":
            figures = {}
            for path, model_figures in read_json(self.artefact).items():
                is_ours = Path(path).parent == self.artefact.parent
                figures[Path(path).stem if is_ours else "natural_model"] = model_figures
            return figures
        if self.script in ("", "prepare_reward_data"):
            return {}
        training = load_checkpoint(self.artefact)["training"]
        return {name: training[name] for name in training if name not in ("settings", "batches")}
