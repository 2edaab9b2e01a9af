"""Render the pages from their templates.

    python detect.py --text essay.txt --reward_model_path out/my_novel/reward_model_v1.pt

A page is one file without scripts that loads nothing else.
"""

from pathlib import Path
from typing import Any

SHARED = Path(__file__).parent  # has shading.html


def render(template: str, beside: str | Path, **values: Any) -> str:
    """Return the HTML of a template beside a file. Every text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # --help does not need it

    loader = FileSystemLoader([Path(beside).parent, SHARED])
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template(template).render(**values)
