"""Charts of points as SVG, for the scripts that compare settings; the project has no library for plots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, MARGIN = 640, 400, 60
LETTER = 7
"""Width of a letter, about."""
COLOURS = ("#1b6ca8", "#b8570f", "#3a7d2c", "#8a3d8f", "#5b5b5b")


def chart(
    title: str,
    across: str,
    columns: Sequence[str],
    lines: Mapping[str, Mapping[str, float]],
    band: tuple[float, float] | None = None,
    *,
    joined: bool = True,
) -> str:
    """An SVG: values over evenly spaced columns.

    Args:
        title: what the values are, and their unit.
        across: what the columns are.
        columns: their names, from left to right.
        lines: by name the value at each column; a column may be missing.
        band: lowest and highest value of what all is compared with, drawn in grey.
        joined: draw the lines, not the points alone: for columns that have an order.
    """
    values = [value for line in lines.values() for value in line.values()] + list(band or ())
    low, high = min(values), max(values)
    room = 0.1 * (high - low) or 1.0
    low, high = low - room, high + room
    inner = WIDTH - 2 * MARGIN
    # names that are too wide for their column take turns on several lines
    rows = -(-max(map(len, columns)) * LETTER * len(columns) // inner)
    whole = HEIGHT + 14 * max(0, rows - 2)

    def x(column: str) -> float:
        return MARGIN + inner * (columns.index(column) + 0.5) / len(columns)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (value - low) / (high - low)

    box = f'viewBox="0 0 {WIDTH} {whole}" font-family="sans-serif" font-size="13"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}>',
        f'<rect width="{WIDTH}" height="{whole}" fill="white"/>',
    ]
    if band is not None:
        top, height = y(band[1]), max(y(band[0]) - y(band[1]), 1)
        parts.append(f'<rect x="{MARGIN}" y="{top:.1f}" width="{inner}" height="{height:.1f}" fill="#e8e8e8"/>')
    for mark in range(5):
        level = low + mark * (high - low) / 4
        parts.append(f'<path d="M{MARGIN} {y(level):.1f}H{WIDTH - MARGIN}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 8}" y="{y(level) + 4:.1f}" text-anchor="end">{level:.1f}</text>')
    for place, column in enumerate(columns):
        below = HEIGHT - MARGIN + (14 + 14 * (place % rows) if rows > 1 else 20)
        parts.append(f'<text x="{x(column):.1f}" y="{below}" text-anchor="middle">{escape(column)}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{whole - 14}" text-anchor="middle">{escape(across)}</text>')
    parts.append(f'<text x="{MARGIN}" y="24">{escape(title)}</text>')
    for place, (name, line) in enumerate(lines.items()):
        colour = COLOURS[place % len(COLOURS)]
        known = [(x(column), y(line[column])) for column in columns if column in line]
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in known)
        if joined:
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"/>' for a, b in known]
        where = f'x="{WIDTH - MARGIN}" y="{24 + 18 * place}" text-anchor="end"'
        parts.append(f'<text {where} fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
