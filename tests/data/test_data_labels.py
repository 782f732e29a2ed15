"""Labels that are numbers, and classes whose names are: no image decides what the labels of the others mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests_sets import some, write_lines

from rapid.data import load_images
from rapid.data.readers.labels import MISSING, from_numbers, from_values, people_of
from rapid.data.readers.source import Source
from rapid.errors import InputError

NAMES = ("0", "1", "2", "3", "01", "10", "2.0", "cat", "dog")


def meant(values: Sequence[Any], classes: Sequence[str] | None) -> list[str] | None:
    """The name of the class of each label; None if they are refused."""
    source = Source(Path("set.csv"), "private", classes=None if classes is None else tuple(classes))
    try:
        if all(isinstance(value, int) for value in values):
            found = from_numbers(np.array(values, np.int64), None, source, "a name")
        else:
            found = from_values(values, None, source)
    except InputError:
        return None
    return [found.names[number] for number in found.numbers]


@given(
    classes=st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True),
    values=st.lists(st.sampled_from((*NAMES, "2.00", "03")), min_size=2, max_size=5)
    | st.lists(st.integers(0, 11), min_size=2, max_size=5),
)
@example(classes=["1", "2", "3"], values=["1", "2", "0"])
@example(classes=["1", "2", "3"], values=[1, 2, 3])
def test_a_label_means_the_same_whatever_other_images_there_are(classes: list[str], values: list[Any]) -> None:
    whole = meant(values, classes)
    for number in range(len(values)):
        rest = meant([*values[:number], *values[number + 1 :]], classes)
        if whole is not None and rest is not None:
            assert rest == [*whole[:number], *whole[number + 1 :]]
    if whole is not None:
        for value, name in zip(values, whole, strict=True):
            assert name == str(value) or str(value) not in classes


@pytest.mark.parametrize(
    ("classes", "values", "names"),
    [
        (("1", "2", "3"), ["1", "2", "2", "3"], ["1", "2", "2", "3"]),
        (("1", "2", "3"), ["1.0", "02", "3.0"], ["1", "2", "3"]),
        (("1", "2", "3"), [1, 3], ["1", "3"]),
        (("1", "2", "3"), [0, 1], None),
        (("1", "2", "3"), ["0", "1"], None),
        (("30", "20"), [20, 30], ["20", "30"]),
        (("0", "1", "other"), [0, 2], ["0", "other"]),
        (("0", "1", "other"), ["0", "2"], ["0", "other"]),
        (("1", "01"), ["1", "01"], ["1", "01"]),
        (("1", "01"), [1, 1], None),
        (("1", "01"), ["001"], None),
        (("cat", "dog"), [1, 0], ["dog", "cat"]),
        (("cat", "dog"), ["1", "0.0"], ["dog", "cat"]),
        (("cat", "dog"), ["1", "cat"], None),
        (("cat", "dog"), [2], None),
        (None, ["2", "0"], ["2", "0"]),
        (None, ["1", "01"], None),
    ],
)
def test_what_labels_mean(classes: tuple[str, ...] | None, values: list[Any], names: list[str] | None) -> None:
    assert meant(values, classes) == names


NUMBERS = [str(number) for number in range(11)]


@pytest.mark.parametrize("typed", [False, True])
@pytest.mark.parametrize("missing", [*sorted(MISSING), " NA ", "", "  ", None])
def test_a_missing_label_is_no_class(missing: str | None, typed: bool) -> None:
    """Else it would decide that 0 to 10 are names, which are numbered as text is sorted."""
    for others in (NUMBERS, ["cat", "dog"]):
        with pytest.raises(InputError) as told:
            from_values([*others, missing, "NA"], None, Source(Path("set.csv"), "public"), typed=typed)
        with pytest.raises(InputError) as kept:
            from_values([*others, missing], None, Source(Path("set.csv"), "private", show_paths=False), typed=typed)
        text = (missing or "").strip()
        row = f"row {len(others) + 1}" + (f": '{text}'" if text else "")
        assert str(told.value).startswith(f"public set.csv: some images have no label ({row}); label all of them")
        assert str(kept.value).startswith("private set.csv: some images have no label")
        assert "\n" not in str(told.value)
        assert ("declare" in str(told.value)) == ("declare" in str(kept.value)) == bool(text)
        assert "row" not in str(kept.value)


@pytest.mark.parametrize("signed", ["-1", "+1", "-1.0", "-0", " -1"])
@pytest.mark.parametrize("others", [NUMBERS, ["cat", "dog"], []])
def test_a_number_with_a_sign_is_no_class(others: list[str], signed: str) -> None:
    with pytest.raises(InputError, match=r"^public set\.csv: 'dx' must be at least 0, without a sign; "):
        from_values([*others, signed], None, Source(Path("set.csv"), "public"), called="dx")


@pytest.mark.parametrize("name", ["NA", "None", "-1", "+1"])
def test_such_a_name_can_be_declared(name: str) -> None:
    classes = ("a", name, "b")
    assert meant(["b", name, "a"], classes) == ["b", name, "a"]
    found = from_values(["b", name], classes, Source(Path("set.csv"), "public"))
    assert found.numbers.tolist() == [2, 1]


def test_text_of_a_format_with_types_is_a_name() -> None:
    found = from_values(["-1", "1"], None, Source(Path("set.jsonl"), "public"), typed=True)
    assert (found.names, found.numbers.tolist()) == (("-1", "1"), [0, 1])


def test_an_npz_and_a_table_agree_on_classes_that_are_numbers(tmp_path: Path) -> None:
    made = some()
    made.write(tmp_path, made.names)
    labels = [1 + number % 3 for number in range(len(made.names))]
    rows = [{"file_name": name, "label": label} for name, label in zip(made.names, labels, strict=True)]
    lines = ["file_name,label", *(f"{row['file_name']},{row['label']}" for row in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines), encoding="utf-8")
    write_lines(tmp_path / "t.jsonl", rows)
    np.savez(tmp_path / "t.npz", images=np.zeros((len(labels), 4, 4), np.uint8), labels=np.array(labels))
    for name in ("t.csv", "t.jsonl", "t.npz"):
        found = load_images(tmp_path / name, "private", ("1", "2", "3"))
        assert found.labels is not None
        assert (found.labels + 1).tolist() == labels, name


def test_thousands_of_digits_are_a_label_like_any_other() -> None:
    """Python refuses to convert them."""
    digits = "1" * 5000
    assert meant([digits, "1"], ("1", "2")) is None
    assert meant([digits, "1"], None) is None
    assert meant([digits, "1"], ("1", digits)) == [digits, "1"]
    assert people_of([digits, f"0{digits}.0", "7", "7.0"], "person").tolist() in ([0, 0, 1, 1], [1, 1, 0, 0])


def test_an_image_does_not_decide_whether_folders_are_classes(tmp_path: Path) -> None:
    """A table without labels lies beside two folders, and only one image is in the second."""
    for name in ("a/0.png", "a/1.png", "b/2.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(some().png(0))
    table = tmp_path / "metadata.csv"
    table.write_text("file_name\na/0.png\na/1.png\nb/2.png\n")
    assert load_images(tmp_path, "private").classes == ("a", "b")
    (tmp_path / "b" / "2.png").unlink()
    table.write_text("file_name\na/0.png\na/1.png\n")
    with pytest.raises(InputError, match="images in one of them only"):
        load_images(tmp_path, "private")
    declared = load_images(tmp_path, "private", ("a", "b"))
    assert declared.labels is not None
    assert declared.labels.tolist() == [0, 0]
    assert load_images(tmp_path, "public").labels is None
