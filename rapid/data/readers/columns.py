"""Which column of a table holds the labels, the file names and the people."""

from __future__ import annotations

from collections.abc import Collection

from rapid.data.readers.source import Source
from rapid.errors import InputError

LABELS = ("label", "labels", "class", "class_name", "category", "target")
"""Names of a column of labels."""
FILES = ("file_name", "filename", "file", "path", "image", "image_id")
"""Names of a column of file names."""
NONE = "none"
"""`--label-column none`: the images are unlabelled."""
_ADVICE = "name the column of the labels by --label-column NAME; --label-column none: no labels"


def label_column(columns: Collection[str], source: Source, likely: Collection[str] = ()) -> str | None:
    """The column of the labels; None if the images are unlabelled.

    That of --label-column; or the only one of LABELS; or the only one of `likely`.

    Args:
        columns: those that could hold labels.
        source: what was asked for.
        likely: columns whose type says that they hold labels.

    Raises:
        InputError: there is no such column, or it is not clear which it is.
    """
    asked, own = source.label_column, people_column(source)
    if asked == NONE:
        return None
    if asked is not None:
        if asked not in columns:
            raise InputError("label_column", f"is not a column of --{source.field}", asked)
        return asked
    candidates = [name for name in columns if name != own]
    known = [name for name in LABELS if name in candidates] or [name for name in candidates if name in likely]
    if len(known) == 1:
        return known[0]
    if known:
        problem = "has several columns that may be the labels"
        raise source.error(f"{problem}; {_ADVICE}", f"{problem} ({', '.join(known)}); {_ADVICE}")
    if candidates:
        problem = f"has no column '{LABELS[0]}'"
        raise source.error(f"{problem}; {_ADVICE}", f"{problem} (found: {', '.join(candidates[:10])}); {_ADVICE}")
    return None


def file_column(columns: Collection[str], source: Source) -> str:
    """The column of the file names.

    Raises:
        InputError: there is none, or several.
    """
    known = [name for name in FILES if name in columns]
    if FILES[0] in known:
        return FILES[0]
    if len(known) == 1:
        return known[0]
    problem = f"needs a header line with one column of file names, '{FILES[0]}'"
    listed = ", ".join(list(columns)[:10]) or "nothing"
    raise source.error(problem, f"{problem} (found: {listed})")


def people_column(source: Source) -> str | None:
    """The column of --unit-column; None if it is not given.

    Raises:
        InputError: --unit-folders is given, which is for folders.
    """
    if source.people is None:
        return None
    if source.people.column is None:
        problem = "is for folders of images; for this format use --unit-column NAME"
        raise InputError("unit_folders", problem, source.path)
    return source.people.column


def check_people(columns: Collection[str], source: Source) -> str | None:
    """The column of --unit-column, which exists; None if it is not given.

    Raises:
        InputError: it does not.
    """
    column = people_column(source)
    if column is not None and column not in columns:
        raise InputError("unit_column", f"is not a column of --{source.field}", column)
    return column
