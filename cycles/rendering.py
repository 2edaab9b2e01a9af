"""Render the pages from their templates.

    python evaluate.py --text FILE --reward_model_path MODEL

A page is one file without scripts that loads nothing else.
"""

from pathlib import Path
from typing import Any


def render(template: str, **values: Any) -> str:
    """Return the HTML of a template in this folder. Every text is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # --help does not need it

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template(template).render(**values)
