"""The table of a run: the figures of its models, and what the policy is beside them.

python run_cycles.py --text my_novel.txt --natural_text other_novels/
"""

from common.intervals import format_figure
from cycles.results import BETTER, WORSE, Model, Results

# The columns: a figure and its form. Columns with VERDICT say what the policy is beside the model.
VERDICT = "verdict"
COLUMNS = {
    "task reward": ("fresh_function_reward", ".3f"),
    "judge's loss of its text": ("judge_loss", ".3f"),
    "the policy's text is": ("judge_loss", VERDICT),
    "unknown words": ("unknown_words", ".1%"),
    "loss on unseen text": ("calibrated_loss", ".3f"),
    "the policy's loss is": ("calibrated_loss", VERDICT),
    "P(natural)": ("fresh_p_natural", ".3f"),
}


def comparison(results: Results) -> list[dict[str, str]]:
    """Return the rows of the table, natural text last: the text of each cell by its column."""
    columns = dict(COLUMNS)
    if not results.task:
        del columns["task reward"]
    models = list(results.models)
    if results.natural:
        models.append(Model("natural text", "natural text", 0, None, results.natural, {}))
    rows = []
    for model in models:
        missing = "-"
        if not model.figures and results.about["outcome"] == "unfinished":
            missing = "in progress"
        row = {"model": model.label}
        for column, (name, form) in columns.items():
            row[column] = cell(model, name, form) or missing
        row["seconds"] = missing
        if model.seconds is not None:
            row["seconds"] = f"{model.seconds:.0f}"
        rows.append(row)
    return rows


def cell(model: Model, name: str, form: str) -> str:
    """Return the text of a cell, or "" if its figure is not measured."""
    figures = model.figures
    verdict = ""
    if form == VERDICT:
        figures = model.differences
        verdict = model.verdict(name)
        form = "+.3f"
    if verdict in (BETTER, WORSE):
        low, high = sorted(abs(figures[f"{name}{end}"]) for end in ("_low", "_high"))
        return f"{verdict}, by {abs(figures[name]):.3f} ({low:.3f} to {high:.3f})"
    if figures.get(name) is None:
        return ""
    if figures.get(f"{name}_low") is None:
        return format(figures[name], form)
    return f"{verdict}: {format_figure(figures, name, form)}".removeprefix(": ")
