"""Folders of images with a table of labels: Hugging Face's `imagefolder`, or a CSV beside the images.

A table is a CSV (separated by commas, semicolons or tabs, with a header line) or JSON lines. One column has the file
names, relative to the folder of the table; the others are found by `rapid.data.readers.columns`.
"""

from __future__ import annotations

import csv
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rapid.data.classes import class_folders, class_name, is_hidden
from rapid.data.readers.columns import LABELS, NONE, check_people, file_column, label_column
from rapid.data.readers.decode import Encoded, decode
from rapid.data.readers.folder import SPLITS, are_plain_splits, has_image, is_image, read_folder
from rapid.data.readers.labels import from_values, people_of
from rapid.data.readers.soft_labels import by_name, join_by_name, read_soft_labels
from rapid.data.readers.source import Records, Source
from rapid.data.readers.suffixes import TABLES as SUFFIXES
from rapid.metadata import SOFT_LABELS
from rapid.parsing import parse_json

TABLES = ("metadata.csv", "metadata.jsonl", "labels.csv", "labels.tsv", "labels.jsonl")
"""Names of tables that are looked for in a folder, in lower or upper case."""
UNREADABLE = "cannot be read; write a CSV with a header line, or a JSON object a line"
ENCODED = "is not UTF-8; save it as UTF-8"
COLUMN_TWICE = "has a column twice; give each column a name of its own"
RAGGED = "has a line with more fields than its header; correct it, or put quotes around fields with separators in them"
MISSING = "names a file that is not there"
ADD = "add the file, or remove its line"
SHORT = "names a file without its suffix, and there are several"
WRITE = "write the suffixes in the table"
TWICE = "names a file twice"
REMOVE = "remove one of its lines"
NAMELESS = "has no file name; fill it in, or remove the line"
LONE = (
    "has several sub-folders, images in one of them only, and a table without labels; name the classes by --classes, "
    "or move the others elsewhere"
)


class _BadTable(Exception):
    """What is wrong with a table: without, and with what is in it."""

    def __init__(self, general: str, detail: str) -> None:
        super().__init__(general)
        self.general, self.detail = general, detail


class _Table(NamedTuple):
    """A table of one set or split."""

    path: Path
    columns: tuple[str, ...]
    rows: list[Mapping[str, Any]]


def has_metadata(path: Path) -> bool:
    """Whether the path is a table of labels, or a folder with one in it or in one of its splits."""
    return path.suffix.lower() in SUFFIXES if path.is_file() else path.is_dir() and bool(_tables(path))


def read_metadata(source: Source) -> Records:
    """Read the images that tables of labels name.

    Raises:
        InputError: see `load_images`; or a table names a file that is not there, or one twice, or does not name an
            image of its folder.
    """
    try:
        tables, columns = _read_all(source)
        if _labelled_by_folders(columns, source):
            return read_folder(source)
        names = file_column(columns, source)
        others = [name for name in columns if name != names]
        people, label = check_people(others, source), label_column(others, source)
        files = [file for table in tables for file in _files(table, names, source)]
        if source.path.is_dir():
            _check_all_named(files, source)
    except OSError as error:
        problem = "a file or folder cannot be read; give yourself the right to read it"
        raise source.error(problem, f"{problem} ({error.strerror})", error.filename) from None
    if not files:
        raise source.error("has no images")
    rows = [row for table in tables for row in table.rows]
    labels = chances = None
    if label is not None:
        typed = all(table.path.suffix.lower() == ".jsonl" for table in tables)
        values = [row.get(label) for row in rows]
        if source.soft_labels and SOFT_LABELS in columns:
            classes, listed = join_by_name([row.get(SOFT_LABELS) for row in rows], values, source)
            labels = from_values(values, classes, source, typed=typed)
            chances = read_soft_labels([listed], labels, source)
        else:
            labels = from_values(values, None, source, typed=typed)
    units = None if people is None else people_of([row.get(people) for row in rows], people)
    found = decode(lambda: map(Encoded, files), source)
    if len(tables) > 1:
        read = f"read from {', '.join(str(table.path.relative_to(source.path)) for table in tables)}"
        found = found._replace(notes=(*found.notes, read))
    return found._replace(labels=labels, units=units, soft_labels=chances)


def table_names(source: Source) -> list[str] | None:
    """The names of the images as the tables write them, in the order of `read_metadata`; None if it reads folders.

    Names of a table in a sub-folder, such as a split, begin with that.

    Args:
        source: a set that `read_metadata` has read.
    """
    tables, columns = _read_all(source)
    if _labelled_by_folders(columns, source):
        return None
    column, names = file_column(columns, source), []
    for table in tables:
        inner = "" if source.path.is_file() else table.path.parent.relative_to(source.path).as_posix()
        start = "" if inner in ("", ".") else f"{inner}/"
        names += [f"{start}{row.get(column)}" for row in table.rows]
    return names


def _read_all(source: Source) -> tuple[list[_Table], tuple[str, ...]]:
    """The tables of a set, and the columns that all of them have."""
    tables = [_read(path, source) for path in ([source.path] if source.path.is_file() else _tables(source.path))]
    return tables, tuple(name for name in tables[0].columns if all(name in table.columns for table in tables))


def _labelled_by_folders(columns: Sequence[str], source: Source) -> bool:
    """Whether no column has the labels, and the images lie in one sub-folder per class, two at least.

    Raises:
        InputError: a private set has images in one of several sub-folders, and no classes are declared.
    """
    if source.path.is_file() or source.people or any(name in LABELS for name in columns):
        return False
    if source.label_column not in (None, NONE):
        return False
    folders = class_folders(source.path)
    # a single one may be called `images`
    if len(folders) < 2 or has_image(source.path) or are_plain_splits(folders, source):
        return False
    if source.classes is not None and {class_name(folder) for folder in folders} <= set(source.classes):
        return True
    filled = sum(map(has_image, folders))
    # one image more, in another sub-folder, would make them classes
    if filled == 1 and source.field == "private":
        raise source.error(LONE)
    return filled > 1


def _tables(path: Path) -> list[Path]:
    """Tables in a folder, in its sub-folders, and in those of its splits and of `data`."""
    outer = class_folders(path)
    inner = [one for folder in outer if folder.name.lower() in (*SPLITS, "data") for one in class_folders(folder)]
    return [table for folder in (path, *outer, *inner) for table in _tables_in(folder)]


def _tables_in(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.name.lower() in TABLES and entry.is_file())
    return [folder / name for name in sorted(names, key=lambda name: TABLES.index(name.lower()))]


def _read(path: Path, source: Source) -> _Table:
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            json = path.suffix.lower() == ".jsonl"
            rows, columns = _json_lines(lines, soft_labels=source.soft_labels) if json else _csv(lines)
    except _BadTable as error:
        raise source.error(f"a table of labels {error.general}", error.detail, path) from None
    except UnicodeDecodeError:
        raise source.error(f"a table of labels {ENCODED}", ENCODED, path) from None
    except (csv.Error, ValueError):  # their messages hold what is in the file
        raise source.error(f"a table of labels {UNREADABLE}", UNREADABLE, path) from None
    return _Table(path, columns, rows)


def _json_lines(lines: Iterable[str], *, soft_labels: bool) -> tuple[list[Mapping[str, Any]], tuple[str, ...]]:
    rows: list[Mapping[str, Any]] = []
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    for line in filter(str.strip, lines):
        row = parse_json(line)
        if not isinstance(row, dict):
            raise ValueError("a line is not an object")
        # of many classes they would take most of the memory
        chances = row.pop(SOFT_LABELS, None)
        rows.append(row | {SOFT_LABELS: by_name(chances, known)} if soft_labels and chances is not None else row)
    return rows, tuple(dict.fromkeys(name for row in rows for name in row))


def _csv(lines: Iterable[str]) -> tuple[list[Mapping[str, Any]], tuple[str, ...]]:
    left, above = iter(lines), 1
    header = next(left, "")
    if header.startswith("sep="):
        # Excel's line that says how it separates columns
        header, above = next(left, ""), 2
    delimiter = max(",;\t", key=header.count)
    columns = tuple(name.strip() for name in next(csv.reader([header], delimiter=delimiter), []))
    if len(set(columns)) < len(columns):
        twice = next(name for number, name in enumerate(columns) if name in columns[:number])
        raise _BadTable(COLUMN_TWICE, COLUMN_TWICE.replace("a column", f"the column '{twice}'", 1))
    reader = csv.reader(left, delimiter=delimiter, skipinitialspace=True, strict=True)
    rows: list[Mapping[str, Any]] = []
    for row in reader:
        if len(row) > len(columns):
            line, problem = above + reader.line_num, RAGGED.partition("; ")[2]
            raise _BadTable(RAGGED, f"line {line} has {len(row)} fields, and the header {len(columns)}; {problem}")
        if row:
            # what a short line leaves out is missing
            rows.append(dict(zip(columns, row, strict=False)))
    return rows, columns


def _files(table: _Table, column: str, source: Source) -> list[str]:
    """Paths of the images that a table names, in its order."""
    names = [row.get(column) for row in table.rows]
    if not all(isinstance(name, str) and name.strip() for name in names):
        raise source.error(f"a line of a table {NAMELESS}", f"a line {NAMELESS}", table.path)
    exact = [_normal(str(name)) for name in names]
    clean = [_normal(str(name).strip()) for name in names]
    for name in clean:
        if name.startswith((os.sep, "..")):
            outside, move = "names a file outside of its folder", "move the table above all its images"
            raise source.error(f"a table {outside}; {move}", f"{outside}: '{name}'; {move}", table.path)
    places = [table.path.parent]
    if source.path.is_file():
        places += [table.path.with_suffix(""), table.path.parent / "images"]
    there: dict[str, str] = {}
    for place in reversed(places):
        there |= _listed(place, {*exact, *clean})
    # a name may begin or end with a blank
    found = [there.get(whole, there.get(name)) for whole, name in zip(exact, clean, strict=True)]
    files = [file for file in found if file]
    if len(files) < len(found):
        first = next(number for number, file in enumerate(found) if not file)
        what, then = (MISSING, ADD) if found[first] is None else (SHORT, WRITE)
        raise source.error(f"a table {what}; {then}", f"{what}: '{clean[first]}'; {then}", table.path)
    if len(set(files)) < len(files):
        counts = Counter(files)
        second = next(name for name, file in zip(clean, files, strict=True) if counts[file] > 1)
        raise source.error(f"a table {TWICE}; {REMOVE}", f"{TWICE}: '{second}'; {REMOVE}", table.path)
    return files


def _normal(name: str) -> str:
    """A file's name as it is compared: file systems of macOS write accents as characters of their own."""
    return os.path.normpath(unicodedata.normalize("NFC", name))


def _folder(place: Path, inner: str) -> Path | None:
    """A folder in another one by its normal name, however its accents are written."""
    if (place / inner).is_dir():
        return place / inner
    for part in Path(inner).parts:
        named = (one for one in place.iterdir() if _normal(one.name) == part) if place.is_dir() else iter(())
        found = next(named, None)
        if found is None:
            return None
        place = found
    return place if place.is_dir() else None


def _listed(place: Path, names: Iterable[str]) -> dict[str, str]:
    """Paths of the files in a folder by the names that a table may give them: with and without their suffix.

    The path is empty where several files have a name without their suffix.
    """
    found: dict[str, str] = {}
    for inner in {os.path.dirname(name) for name in names}:  # noqa: PTH120 - a million names
        folder = _folder(place, inner)
        if folder is None:
            continue
        with os.scandir(folder) as entries:
            files = sorted(entry.name for entry in entries if not entry.is_dir())
        by_name: dict[str, str] = {}
        for name in filter(is_image, files):
            stem = os.path.splitext(name)[0]  # noqa: PTH122
            by_name[stem] = "" if stem in by_name else str(folder / name)
        by_name |= {name: str(folder / name) for name in files}
        found |= {_normal(os.path.join(inner, short)): path for short, path in by_name.items()}  # noqa: PTH118
    return found


def _check_all_named(files: Sequence[str], source: Source) -> None:
    """Raise if an image of the folder has no line in a table."""
    named = set(files)
    for folder, folders, names in os.walk(source.path):
        folders[:] = [name for name in folders if not is_hidden(name)]
        for name in names:
            if is_image(name) and (path := str(Path(folder) / name)) not in named:
                problem = "has no line in a table of labels; add it, or give the table itself as the path"
                raise source.error(f"an image {problem}", problem, path)
