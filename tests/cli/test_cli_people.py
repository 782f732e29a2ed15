"""`--unit-column` and `--unit-folders` as a user meets them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests_process import run

from rapid.cli import main
from rapid.data import load_images
from rapid.data.units import PeopleFrom
from rapid.dp.ledger import Ledger

PEOPLE = 40


@pytest.fixture
def arrays(digits: Path) -> dict[str, NDArray[Any]]:
    """100 digits of 40 people; the first has 25 images, some in several classes."""
    with np.load(digits) as archive:
        found = dict(archive)
    found["who"] = np.array([f"smith{number}" for number in (*[0] * 24, *np.arange(76) % PEOPLE)])
    return found


@pytest.fixture
def column(tmp_path: Path, arrays: dict[str, NDArray[Any]]) -> Path:
    np.savez(tmp_path / "people.npz", **arrays)
    return tmp_path / "people.npz"


@pytest.fixture
def folders(tmp_path: Path, arrays: dict[str, NDArray[Any]]) -> Path:
    return in_folders(tmp_path / "people", arrays, labelled=True)


def in_folders(root: Path, arrays: dict[str, NDArray[Any]], *, labelled: bool) -> Path:
    for number, (image, label, who) in enumerate(zip(arrays["images"], arrays["labels"], arrays["who"], strict=True)):
        folder = root / str(label) / who if labelled else root / who
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    return root


def of_people(images: NDArray[np.uint8], people: NDArray[Any]) -> list[list[bytes]]:
    """The images of each person, whatever they are called."""
    return sorted(
        sorted(image.tobytes() for image in images[people == person]) for person in np.unique(people).tolist()
    )


def test_an_array_and_folders_say_the_same(
    tmp_path: Path, column: Path, folders: Path, arrays: dict[str, NDArray[Any]]
) -> None:
    flat = in_folders(tmp_path / "flat", arrays, labelled=False)
    (folders / "empty class").mkdir()
    wanted = of_people(arrays["images"], arrays["who"])
    for path, people, labelled in (
        (column, PeopleFrom("who"), True), (folders, PeopleFrom(), True), (flat, PeopleFrom(), False),
    ):  # fmt: skip
        found = load_images(path, "private", people=people, show_paths=False)
        assert found.units is not None
        assert found.unit_count == PEOPLE
        assert (found.labels is not None) == labelled
        assert of_people(found.images, found.units) == wanted
    assert "empty class" in load_images(folders, "private", people=PeopleFrom()).classes


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_people(
    tmp_path: Path, public_bundle: Path, column: Path, folders: Path, arrays: dict[str, NDArray[Any]]
) -> None:
    book = tmp_path / "ledger.jsonl"
    train = ("train-private", "--base", public_bundle, "--epsilon", 5, "--delta", 1e-3, "--ledger", book)
    train = (*train, "--set", "private.multiplicity=2")
    for name, source in (
        ("column", ("--private", column, "--unit-column", "who")),
        ("folders", ("--private", folders, "--unit-folders")),
    ):
        out = tmp_path / name
        made = run(*train, *source, "--out", out)
        assert made.returncode == 0, made.stderr
        statement = json.loads((out / "privacy.json").read_text())
        assert (statement["unit"], statement["dataset_size"]) == ("one person", PEOPLE)
        assert statement["adjacency"] == "add or remove one person"
        assert "the number of people N is public" in statement["relation"]["words"]
        assert statement["sample_rate"] == 20 / PEOPLE
        assert "per person" in statement["mechanism"]
        assert "people with an image" in next(one["title"] for one in statement["releases"] if one["name"] == "overlap")
        assert f"the private images of {PEOPLE} people" in made.stdout
        assert "whether any one person was among them" in (out / "README.md").read_text()
        # neither who they are, nor how many images they have
        texts = [path for path in out.rglob("*") if path.suffix in (".json", ".md", ".pt")]
        written = b"".join(path.read_bytes() for path in texts) + (made.stdout + made.stderr).encode()
        assert b"smith" not in written
        # the advice at the end has a number of its own, and so has the folder of the tests
        shown = (made.stdout.replace("--count 100", "") + made.stderr).replace(str(tmp_path.parent), "")
        assert not re.search(r"(?<![\d.])100(?![\d.])(?! ?%)", shown)
        assert "latents" not in made.stderr
    # both are the same data set
    assert len({entry.dataset for entry in Ledger(book).entries()}) == 1
    assert {entry.unit for entry in Ledger(book).entries() if entry.kind == "reserve"} == {"one person"}
    shown = run("ledger", "show", "--ledger", book).stdout
    assert shown.count(", for one person\n") == shown.count("  run ") == 2
    runs = json.loads(run("ledger", "show", "--json", "--ledger", book).stdout)["datasets"][0]["runs"]
    assert [one["unit"] for one in runs] == ["one person"] * 2
    # the same images, one of which is now another person's
    arrays["who"][0] = "smith1"
    np.savez(column, **arrays)
    other = run(*train, "--private", column, "--unit-column", "who", "--out", tmp_path / "column", "--resume")
    assert other.returncode == 2
    assert "assigns images to other people" in other.stderr
    plain = run(*train, "--private", column, "--out", tmp_path / "column", "--resume")
    assert plain.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--private {npz} --unit-column whose", "--unit-column whose: is not an array of --private"),
        ("--private {npz} --unit-column short", "one entry for each image"),
        ("--private {npz} --unit-column images", "one entry for each image"),
        ("--private {npz} --unit-column real", "strings or integers"),
        ("--private {npz} --unit-column blank", "empty entry"),
        ("--private {npz} --unit-folders", "use --unit-column NAME"),
        ("--private {folder} --unit-column who", "use --unit-folders"),
        ("--private {loose} --unit-folders", "every image lies in a person's folder"),
        ("--private {npz} --unit-column who --unit-folders", "not allowed with"),
        ("--private {npz} --unit-column who --set private.group_size=2", "the unit is a person already"),
        ("--private {npz} --unit-column who --batch 90", "40 people (people are drawn, not images)"),
        ("--size 0 --unit-folders", "must be the number of people"),
    ],
)
def test_bad_input(
    arguments: str, words: str, tmp_path: Path, arrays: dict[str, NDArray[Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    arrays |= {"short": arrays["who"][:-1], "real": np.arange(100.0), "blank": arrays["who"].copy()}
    arrays["blank"][3] = ""
    np.savez(tmp_path / "people.npz", **arrays)
    some = {name: value[:3] for name, value in arrays.items()}
    folder, loose = (in_folders(tmp_path / name, some, labelled=True) for name in ("folder", "loose"))
    Image.fromarray(arrays["images"][0]).save(loose / str(arrays["labels"][0]) / "x.png")
    places = {"npz": tmp_path / "people.npz", "folder": folder, "loose": loose}
    command = ["plan", "--preset", "demo", "--epsilon", "5", *(part.format(**places) for part in arguments.split())]
    try:
        code = main(command)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    shown = capfd.readouterr().err.replace(str(tmp_path), "")
    assert words in shown
    assert "smith" not in shown
    assert not re.search(r"\b(99|100)\b", shown)


def test_plan_counts_people(column: Path, capfd: pytest.CaptureFixture[str]) -> None:
    numbers = ["--epsilon", "5", "--batch", "20", "--steps", "3", "--preset", "demo"]
    assert main(["plan", "--private", str(column), "--unit-column", "who", *numbers]) == 0
    shown = capfd.readouterr().out
    assert f"{PEOPLE} people, each with all their images" in shown
    assert main(["plan", "--size", str(PEOPLE), "--unit-folders", *numbers]) == 0
    assert capfd.readouterr().out == shown


def test_the_ledger_names_the_flag_for_folders_of_people(
    tmp_path: Path, folders: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ledger = tmp_path / "ledger.jsonl"
    limit = ["ledger", "limit", str(folders), "--epsilon", "3", "--delta", "1e-5", "--ledger", str(ledger)]
    assert main(limit) == 2
    assert "or add --unit-folders if the folders in it are people" in capfd.readouterr().err
    assert main([*limit, "--unit-folders"]) == 0
