"""Labels as they are written, turned into class numbers and class names, and people into numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rapid.data.readers.source import Labels, Source
from rapid.data.units import numbered
from rapid.errors import InputError

MOST = 65_536
"""Largest number of classes that labels without names may have."""
NO_LABEL = "some images have no label"
WRITTEN = "text such as NA, nan, NULL or None"
LABEL_ALL = "label all of them, or read none of the labels by --label-column none"
WHOLE = re.compile(r"[0-9]+(?:\.0+)?")
"""A whole number in text; spreadsheets and pandas write 1.0 where a column had gaps."""
SIGNED = re.compile(rf"[+-]{WHOLE.pattern}")
UNSIGNED = "must be at least 0, without a sign; number the classes from 0, or declare their names by --classes"
UNNUMBERED = "has numbers that are no names of --classes, which are numbers themselves"
RENUMBER = "write the names as labels, or declare all of them"
SPELT = "labels write a number in several ways, such as 1 and 01; write each in one way, or declare the classes"
MISSING = frozenset(("NA", "N/A", "n/a", "<NA>", "NaN", "nan", "NULL", "null", "None"))
"""What R, pandas, databases and Python write for a missing value."""
NOBODY = "has an empty entry, or one such as NA, nan, NULL or None; say for every image whose it is"
KINDS = "labels must be whole numbers or names, all of one kind; name another column by --label-column, or correct them"


def from_numbers(
    numbers: NDArray[np.int64], names: tuple[str, ...] | None, source: Source, what: str, *, called: str = "labels"
) -> Labels:
    """Labels that are numbers of classes.

    Declared classes are numbered from 0 in their order. If their names are numbers themselves, but other ones (1 to 5),
    a label is a name: which it is must not depend on what labels there are.

    Args:
        numbers: int64 (N,), N >= 1.
        names: class names of the set; None: the declared ones, or the numbers themselves.
        source: the declared classes.
        what: a name of the set, for messages, such as "the name of a sub-folder".
        called: the labels, for messages.

    Raises:
        InputError: a number without a class, a name twice, or a name that is not declared.
    """
    if numbers.min() < 0:
        raise source.error(f"'{called}' must be at least 0; number the classes from 0")
    if names is None and source.classes is not None:
        numbers = _places(numbers, source.classes, source, called)
    return _labels(numbers, names, source, what, called)


def _labels(
    numbers: NDArray[np.int64], names: tuple[str, ...] | None, source: Source, what: str, called: str
) -> Labels:
    """As `from_numbers`, of numbers that are the places of names."""
    classes, largest = source.classes, int(numbers.max())
    if names is None and classes is None and largest >= MOST:
        raise source.error(f"'{called}' has numbers of {MOST:,} and more; declare the classes by --classes")
    own = names if names is not None else classes or tuple(map(str, range(largest + 1)))
    if not all(name.strip() for name in own):
        raise source.error("'classes' has an empty name; give each class a name")
    if len(set(own)) < len(own):
        raise source.error("'classes' has a name twice; give each class a name of its own")
    if largest >= len(own):
        problem = f"'{called}' must lie in 0..{len(own) - 1}: there are {len(own)} classes"
        raise source.error(f"{problem}; correct the labels, or name all classes")
    if classes is not None:
        return Labels(numbers_of(own, classes, what, source)[numbers], classes, declared=True)
    return Labels(numbers, own, declared=names is not None)


def from_values(
    values: Sequence[Any],
    names: tuple[str, ...] | None,
    source: Source,
    *,
    called: str = "labels",
    typed: bool = False,
) -> Labels:
    """Labels that are numbers or names, as a column has them.

    In a format without types, text is a whole number ("7", "7.0") if all of it is, but a class that is called so comes
    first. There, and where no classes are declared, a number with a sign ("-1") is neither a number nor a name.

    Args:
        values: N of them, N >= 1; None and empty text are missing labels, and so is text of `MISSING` where no classes
            are declared.
        names: class names of the set that numbers belong to, such as those of a ClassLabel; None: there are none.
        source: the declared classes.
        called: the column, for messages.
        typed: whether the format tells numbers from text, so that text is always a name.

    Raises:
        InputError: a missing label, one of another kind, or one that is not declared.
    """
    classes = source.classes if source.classes is not None else names
    _check_all_labelled(values, source, declared=classes is not None)
    kinds = {type(value) for value in values}
    if kinds <= {int}:
        return from_numbers(_whole(values, source), names, source, "a name of its classes", called=called)
    if kinds != {str}:
        raise source.error(KINDS)
    found = list(values) if typed else [value.strip() for value in values]
    known = sorted(set(found))
    if not typed and all(WHOLE.fullmatch(name) for name in known):
        places = _places_of(known, names if names is not None else source.classes, source, called)
        numbers = np.array([places[name] for name in found], np.int64)
        return _labels(numbers, names, source, "a name of its classes", called)
    if classes is None and not typed and any(SIGNED.fullmatch(name) for name in known):
        # as names they would make names of all numbers beside them
        raise source.error(f"'{called}' {UNSIGNED}")
    own = classes if classes is not None else tuple(known)
    place = dict(zip(known, numbers_of(known, own, "a label", source).tolist(), strict=True))
    return Labels(np.array([place[name] for name in found], np.int64), own, declared=classes is not None)


def _check_all_labelled(values: Sequence[Any], source: Source, *, declared: bool) -> None:
    """Raise if a label is missing; rows are counted from 1. See `from_values`."""
    others = frozenset(("",)) if declared else MISSING | {""}
    for number, value in enumerate(values, 1):
        text = value.strip() if isinstance(value, str) else ""
        if value is None or (isinstance(value, str) and text in others):
            if not text:
                raise source.error(f"{NO_LABEL}; {LABEL_ALL}", f"{NO_LABEL} (row {number}); {LABEL_ALL}")
            fix = f"{LABEL_ALL}; if it is the name of a class, declare it by --classes"
            raise source.error(f"{NO_LABEL}, but {WRITTEN}; {fix}", f"{NO_LABEL} (row {number}: '{text}'); {fix}")


def _places(numbers: NDArray[np.int64], classes: Sequence[str], source: Source, called: str) -> NDArray[np.int64]:
    """The places of classes with these numbers among the declared ones, (N,): see `from_numbers`."""
    named = {place: _digits(name) for place, name in enumerate(classes) if WHOLE.fullmatch(name)}
    if all(digits == str(place) for place, digits in named.items()):
        return numbers
    place_of = {digits: place for place, digits in named.items()}
    found, inverse = np.unique(numbers, return_inverse=True)
    if len(place_of) < len(named) or any(str(number) not in place_of for number in found):
        raise source.error(f"'{called}' {UNNUMBERED}; {RENUMBER}")
    return np.array([place_of[str(number)] for number in found], np.int64)[inverse.reshape(-1)]


def _places_of(known: Sequence[str], classes: Sequence[str] | None, source: Source, called: str) -> dict[str, int]:
    """The place of each label among the classes: that of its name, or by its number if no class is called so.

    Args:
        known: different labels, whole numbers in text.
        classes: that are declared, or that the set has; None: the numbers are the places.
        source: for messages.
        called: the column, for messages.
    """
    wanted = set(known)
    places = {name: place for place, name in enumerate(classes or ()) if name in wanted}
    others = [name for name in known if name not in places]
    if len({_digits(name) for name in others}) < len({name.partition(".")[0] for name in others}):
        raise source.error(SPELT)
    numbers = _whole([_digits(name) for name in others], source)
    if classes is not None and others:
        numbers = _places(numbers, classes, source, called)
    return places | dict(zip(others, numbers.tolist(), strict=True))


def _digits(name: str) -> str:
    """A whole number in text, written as Python does; `int` takes no thousands of digits."""
    return name.partition(".")[0].lstrip("0") or "0"


def numbers_of(names: Sequence[str], classes: Sequence[str], what: str, source: Source) -> NDArray[np.int64]:
    """Number of each name among the declared classes.

    Raises:
        InputError: a name is not declared.
    """
    numbers = {name: number for number, name in enumerate(classes)}
    if others := [name for name in names if name not in numbers]:
        problem, add = f"{what} is not among --classes", "add it there, or correct it"
        raise source.error(f"{problem}; {add}", f"{problem}: '{others[0]}'; {add}")
    return np.array([numbers[name] for name in names], np.int64)


def people_of(values: Sequence[Any], column: str) -> NDArray[np.int64]:
    """The number of the person that each image shows, int64 (N,), from a column.

    Args:
        values: numbers or names; see `people_called`.
        column: where they are, for messages.

    Raises:
        InputError: values of another kind, or none for an image.
    """
    kinds = {type(value) for value in values}
    if type(None) in kinds:
        raise InputError("unit_column", NOBODY, column)
    if kinds == {int}:
        return np.unique(np.array(values, object), return_inverse=True)[1].reshape(-1).astype(np.int64)
    if kinds != {str}:
        raise InputError("unit_column", "must hold strings or integers, all of one kind", column)
    found = people_called(values)
    if found is None:
        raise InputError("unit_column", NOBODY, column)
    return found


def people_called(names: Sequence[str]) -> NDArray[np.int64] | None:
    """The number of the person that each image shows, int64 (N,), from names in a column or of folders.

    Names are the same person's if they are apart by white space around them, or are one whole number.

    Args:
        names: of the person of each image.

    Returns:
        The numbers; None if a name is empty or in `MISSING`.
    """
    bare = [name.strip() for name in names]
    # images of several people would be protected as if they were of one
    if any(not name or name in MISSING for name in bare):
        return None
    # spreadsheets and pandas write 7 as 7.0: taken for two, a person would have half of the protection
    return numbered(_digits(name) if WHOLE.fullmatch(name) else name for name in bare)


def _whole(values: Sequence[Any], source: Source) -> NDArray[np.int64]:
    try:
        return np.array([int(value) for value in values], np.int64)
    except (OverflowError, ValueError):  # thousands of digits, too
        raise source.error(KINDS) from None
