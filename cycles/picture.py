"""The picture of a run: quality of fresh text against its diversity, a curve for each model.

    python run_cycles.py --text my_novel.txt --natural_text other_novels/

After Caccia et al. 2020, "Language GANs falling short" (arXiv 1811.02549), figure 1.
"""

import base64
import io

from cycles.results import Results

# Okabe and Ito, "Color Universal Design" (2008): distinct for colour-blind readers too. A picture
# has at most seven models.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
GREY = "#555555"
STYLE = {
    "font.size": 8.5,
    "axes.grid": True,
    "axes.prop_cycle": f"cycler(color={COLOURS})",
    "grid.color": "#d8d8d8",
    "legend.frameon": False,
}


def draw_picture(results: Results) -> str:
    """Return the picture as the source of an image in HTML, or "" if nothing is measured."""
    models = [model for model in results.models if "sweep" in model.figures]
    if not models:
        return ""
    import matplotlib.style  # takes half a second
    from matplotlib.figure import Figure

    with matplotlib.style.context(["default", STYLE]):  # ignores the user's matplotlibrc
        figure = Figure(figsize=(4.5, 3.5), layout="constrained")
        axes = figure.subplots()
        natural = models[0].figures["natural"]
        place = (natural["distinct_pairs"], natural["judge_loss"])
        for model in models:
            sweep = model.figures["sweep"]
            pairs = [point["distinct_pairs"] for point in sweep]
            losses = [point["judge_loss"] for point in sweep]
            (curve,) = axes.plot(pairs, losses, ".-", label=model.label)  # a point a temperature
            if "judge_loss" in model.figures:  # the value of the table, a short bar
                judged = model.figures["judge_loss"]
                axes.plot(place[0], judged, "_", color=curve.get_color(), markersize=16)
        axes.plot(*place, "*", color=GREY, markersize=12, label="natural text")
        axes.axvline(place[0], color=GREY, linestyle="--", linewidth=1)
        axes.set(
            xlabel="share of distinct pairs (higher: more diverse)",
            ylabel="judge's loss (lower: better)",
        )
        figure.legend(loc="outside lower center", ncols=2)
        png = io.BytesIO()
        figure.savefig(png, dpi=200, transparent=True)  # on the colour of the page
    return f"data:image/png;base64,{base64.b64encode(png.getvalue()).decode()}"
