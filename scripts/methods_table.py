"""Results of `benchmark_methods.py`: `results.json`, its table, and a picture for each row."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rapid.evaluate.networks import CLASSIFIERS
from rapid.files import replacing, write_json
from rapid.pictures import table

SAMPLES = 20
"""Images of each class in a picture."""
CLASSES_SHOWN = 26

Json = dict[str, Any]


def read_json(path: Path) -> Json:
    """The object in a file."""
    found: Json = json.loads(path.read_text(encoding="utf-8"))
    return found


def write_results(report: Path, measured: Sequence[Json], floor: Json | None, order: Sequence[str]) -> None:
    """Write `results.json` and the table: the rows measured, and the others that are there.

    Args:
        report: folder of both.
        measured: the new rows.
        floor: fidelity of real images; None for what is there.
        order: names of rows, as they follow one another within an epsilon.
    """
    file = report / "results.json"
    earlier = read_json(file) if file.exists() else {"rows": [], "floor": None}
    floor = floor or earlier["floor"]
    by_key = {_key(row, order): row for row in (*earlier["rows"], *measured)}
    # without places of files on this machine
    rows = [{name: row[name] for name in row if name not in ("source", "picture")} for _, row in sorted(by_key.items())]
    write_json(file, {"floor": floor, "rows": rows})
    tested = {name for row in rows for name in row.get("networks", {})}
    shown = [name for name in CLASSIFIERS if name in tested]
    columns = ["epsilon", "method", "images", "accuracy %", *shown, "Frechet", "precision", "recall"]
    columns += ["label agreement %", "calls", "ms an image", "public min", "private min"]
    columns += ["processor min, public", "private", "steps", "noise multiplier"]
    lines = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    for row in rows:
        fidelity, networks = row.get("fidelity") or {}, row.get("networks", {})
        cells = [f"{row['epsilon']:g}", row["name"], _variant(row), _number(row["accuracy"], ".2f")]
        cells += [_number(networks.get(name), ".2f") for name in shown]
        cells += [_number(fidelity.get("frechet"), ".3g")]
        cells += [_number(fidelity.get(name), ".3f") for name in ("precision", "recall")]
        cells += [_number(row.get("agreement"), ".1f")]
        seconds = row.get("seconds_an_image")
        cells += [_number(row.get("calls"), ".4g"), _number(None if seconds is None else 1000 * seconds, ".3g")]
        cells += [_minutes(row["seconds"]["public"]), _minutes(row["seconds"]["private"])]
        processor = row.get("processor", {})
        cells += [_minutes(processor.get("public")), _minutes(processor.get("private"))]
        cells += [_number(row["privacy"].get("steps"), ",d"), _number(row["privacy"].get("noise_multiplier"), ".3g")]
        lines.append(f"| {' | '.join(cells)} |")
    words = [
        "",
        "Accuracy on real test images: of a classifier itself, or else the mean of the networks in the next columns,",
        "which are trained on synthetic images alone. Frechet distance: in the features of the reports, not FID.",
    ]
    if floor is not None:
        words.append(
            f"As many real training images have {floor['frechet']:.3g}, precision {floor['precision']:.3f} and "
            f"recall {floor['recall']:.3f}."
        )
    words += ["Minutes are those of the commands, with the start of the program and the measurement of a step.", ""]
    with replacing(report / "table.md") as target:
        target.write_text("\n".join([*lines, *words]), encoding="utf-8")
    print("\n".join([*lines, *words]), flush=True)


def save_picture(report: Path, row: Json) -> None:
    """The first images of each class, or the confusion matrix of a classifier."""
    name = "-".join(word for word in (row["name"], f"{row['epsilon']:g}", row.get("variant", "")) if word)
    with replacing(report / "samples" / f"{name}.png") as target:
        if "picture" in row:
            shutil.copy(row["picture"], target)
            return
        with np.load(row["source"]) as found:
            images, labels, classes = (found[part] for part in ("images", "labels", "classes"))
        shown = np.unique(labels)[:CLASSES_SHOWN].tolist()
        lines = [(str(classes[label]), images[labels == label][:SAMPLES]) for label in shown]
        title = f"{row['name']}, epsilon = {row['epsilon']:g}{', ' + _variant(row) if row['variant'] else ''}"
        Image.fromarray(table(lines, title=title, scale=1)).save(target)


def _key(row: Json, order: Sequence[str]) -> tuple[float, int, str, str]:
    place = order.index(row["name"]) if row["name"] in order else len(order)
    return row["epsilon"], place, row["name"], row.get("variant", "")


def _variant(row: Json) -> str:
    return {"drawn": "as drawn", "probe": "with the probe", "": "as drawn"}.get(row.get("variant"), "none")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _minutes(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds / 60:.1f}"
