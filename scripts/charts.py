"""Charts of points as SVG, for the scripts that compare settings. Needs matplotlib (extra `bench`)."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

import matplotlib as mpl
from matplotlib.figure import Figure

# equal numbers give equal files; text stays text
STYLE = {"svg.hashsalt": "rapid", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}


def chart(
    title: str,
    across: str,
    columns: Sequence[str],
    lines: Mapping[str, Mapping[str, float]],
    band: tuple[float, float] | None = None,
    *,
    joined: bool = True,
) -> str:
    """Draw values over evenly spaced columns, as SVG.

    Args:
        title: what the values are, and their unit.
        across: what the columns are.
        columns: their names, from left to right.
        lines: the values by line and column; a line may lack columns.
        band: lowest and highest value of the baseline, drawn in grey.
        joined: connect the points of a line; for columns that have an order.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7, 4.4), layout="constrained")
        axes = figure.subplots()
        if band is not None:
            axes.axhspan(*band, color="0.9")
        for name, line in lines.items():
            known = [column for column in columns if column in line]
            places = [columns.index(column) for column in known]
            axes.plot(places, [line[column] for column in known], "o-" if joined else "o", label=name)
        # long names overlap unless they are tilted
        tilt = {"rotation": 30, "ha": "right"} if sum(map(len, columns)) > 60 else {}
        axes.set_xticks(range(len(columns)), columns, **tilt)
        axes.set(xlabel=across, xlim=(-0.5, len(columns) - 0.5))
        axes.set_title(title, loc="left", fontsize="medium")
        axes.grid(axis="y", alpha=0.4)
        if any(lines):
            axes.legend()
        stream = io.StringIO()
        figure.savefig(stream, format="svg", metadata={"Date": None})
    return stream.getvalue()
