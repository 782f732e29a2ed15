"""Tables, Parquet files and tars that are refused, and what is told of private ones."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import shutil
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet
from tests_sets import STRUCT, as_binary_parquet, as_metadata_csv, as_npz, as_tar, some, write_csv

from rapid.data import load_images
from rapid.data.units import PeopleFrom
from rapid.errors import InputError


def gone(path: Path) -> None:
    (path / "001.png").unlink()


def unnamed(path: Path) -> None:
    shutil.copy(path / "001.png", path / "anna-smith.png")


def edited(change: Callable[[list[dict[str, Any]]], object]) -> Callable[[Path], None]:
    """A change of the rows of metadata.csv."""

    def spoil(path: Path) -> None:
        with (path / "metadata.csv").open(newline="", encoding="utf-8") as stream:
            rows = list(csv.DictReader(stream))
        write_csv(path / "metadata.csv", list(change(rows) or rows))  # type: ignore[call-overload]

    return spoil


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return edited(lambda rows: [{new if name == old else name: value for name, value in row.items()} for row in rows])


def text(content: bytes) -> Callable[[Path], object]:
    return lambda path: (path / "metadata.csv").write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "hidden", "shown"),
    [
        (gone, "a table names a file that is not there", "names a file that is not there: '001.png'"),
        (unnamed, "an image has no line in a table of labels", "anna-smith.png: has no line"),
        (edited(lambda rows: rows[2].update(label=" ")), "some images have no label", "some images have no label"),
        (edited(lambda rows: rows[2].update(file_name="")), "a line of a table has no file name", "no file name"),
        (edited(lambda rows: rows[2].update(file_name="../x.png")), "a file outside of its folder", "'../x.png'"),
        (edited(lambda rows: rows[2].update(file_name="/x.png")), "a file outside of its folder", "'/x.png'"),
        (edited(lambda rows: rows[2].update(file_name="001.png")), "a table names a file twice", "names a file twice"),
        (edited(lambda rows: [row | {"class": "a"} for row in rows]), "several columns that may be", "(label, class)"),
        (renamed("label", "dx"), "has no column 'label'", "(found: dx, who)"),
        (renamed("file_name", "where"), "one column of file names, 'file_name'", "(found: where, label, who)"),
        (text(b"file_name,label\n\n000.png,a,anna-smith\n"), "a line with more fields", "line 3 has 3"),
        (text(b'sep=,\nfile_name,label\n0.png,"a\nb"\n1.png,a,anna-smith'), "a line with more fields", "line 5 has 3"),
        (text(b"file_name,anna-smith,label,anna-smith\n"), "has a column twice", "has the column 'anna-smith' twice"),
        (text(b'file_name,label\n000.png,"a'), "a table of labels cannot be read", "header line"),
        (text(b"\xff\xfe\x00"), "a table of labels is not UTF-8", "metadata.csv: is not UTF-8; save it as UTF-8"),
        (text("file_name,label\n000.png,fi\xe8vre\n".encode("latin-1")), "is not UTF-8", "metadata.csv: is not UTF-8"),
        (text(b""), "one column of file names", "found: nothing"),
        (text(b"file_name,label\n"), "an image has no line", "has no line"),
        (text(b"file_name,label\n000.png\n"), "an image has no line", "has no line"),
    ],
)
def test_bad_tables(tmp_path: Path, spoil: Callable[[Path], object], hidden: str, shown: str) -> None:
    path = as_metadata_csv(some(), tmp_path / "set")
    spoil(path)
    with pytest.raises(InputError) as told:
        load_images(path, "private")
    with pytest.raises(InputError) as kept:
        load_images(path, "private", show_paths=False)
    assert shown in str(told.value)
    assert hidden in str(kept.value)
    for error in (told, kept):
        assert error.value.exit_code == 2
        assert "\n" not in str(error.value)
    private = str(kept.value).replace(str(tmp_path), "")
    assert not [word for word in ("anna", ".png", "dx", "class'", "where") if word in private]


def spoilt_parquet(tmp_path: Path, **columns: Any) -> Path:
    made = some()
    own = {"image": [made.png(number) for number in range(4)], "label": list(made.labels)}
    parquet.write_table(pa.table(own | columns), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"label": [0, 1, None, 2]}, "some images have no label"),
        ({"label": [0, 1, -1, 2]}, "must be at least 0"),
        ({"label": [0.0, 1.0, 2.0, 1.0]}, "whole numbers or names"),
        ({"image": ["a", "b", "c", "d"]}, "needs a column 'image'"),
        ({"image": [b"a", b"b", b"c", b"d"]}, "is not a readable image"),
        ({"image": pa.array([{"bytes": None, "path": "anna.png"}] * 4, STRUCT)}, "has no bytes of an image"),
        ({"who": [None, "a", "b", "c"]}, "has an empty entry"),
        ({"who": [0.5, 1.5, 1.5, 1.5]}, "must hold strings or integers"),
        ({"whose": ["a", "a", "b", "c"]}, "is not a column of --private"),
        # text that is not UTF-8, and times that Python does not have
        ({"label": pa.array([b"anna\xff", b"b", b"c", b"d"], pa.binary()).view(pa.string())}, "is damaged"),
        ({"label": pa.array([-(2**62) + 1, 0, 1, 2], pa.timestamp("ns"))}, r"is damaged|whole numbers or names"),
        ({"label": pa.array([-(2**62), 0, 1, 2], pa.timestamp("us"))}, r"is damaged|whole numbers or names"),
    ],
)
def test_bad_parquet(tmp_path: Path, columns: dict[str, Any], words: str) -> None:
    path = spoilt_parquet(tmp_path, **columns)
    people = PeopleFrom("who") if {"who", "whose"} & set(columns) else None
    with pytest.raises(InputError, match=words) as caught:
        load_images(path, "private", show_paths=False, people=people)
    assert "anna" not in str(caught.value)
    assert "4611686" not in str(caught.value)


def test_the_path_beside_the_bytes_of_an_image_is_not_read(tmp_path: Path) -> None:
    made = some()
    names = pa.array([b"\xff"] * 4, pa.binary()).view(pa.string())
    image = pa.StructArray.from_arrays([pa.array([made.png(number) for number in range(4)]), names], ["bytes", "path"])
    found = load_images(spoilt_parquet(tmp_path, image=image), "private", show_paths=False)
    assert len(found) == 4


def test_damaged_files_say_nothing_of_their_content(tmp_path: Path) -> None:
    table, tar = as_binary_parquet(some(), tmp_path / "p"), as_tar(some(), tmp_path / "t")
    for path in (table, tar):
        good = path.read_bytes()
        for content in (b"", good[: len(good) // 2 + 7], b"anna-smith" * 100):
            path.write_bytes(content)
            with pytest.raises(InputError, match=r"is damaged|readable image|exactly one image") as caught:
                load_images(path, "private", show_paths=False, label_column="none")
            assert "smith" not in str(caught.value)


COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    # level 0 keeps the bytes as they are
    "gz": lambda content: gzip.compress(content, 0),
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


@pytest.mark.parametrize("suffix", COMPRESSED)
def test_a_compressed_tar_is_compared_with_its_checksums(tmp_path: Path, suffix: str) -> None:
    """They lie behind the last image, and may be all that tells of another byte."""
    made = some()
    plain = as_tar(made, tmp_path / "plain").read_bytes()
    good, path = COMPRESSED[suffix](plain), tmp_path / f"set.tar.{suffix}"
    path.write_bytes(good)
    np.testing.assert_array_equal(load_images(path, "private").images, made.images)
    spoilt = [good[:-cut] for cut in range(1, 13)]
    spoilt += [good[:-place] + bytes([good[-place] ^ 1]) + good[len(good) - place + 1 :] for place in (3, 4, 7)]
    if suffix == "gz":
        spoilt.append(good.replace(b"a caption", b"b caption", 1))
    for content in spoilt:
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"^private .*: is damaged, ends early, or is not a tar$"):
            load_images(path, "private")


def test_libraries_describe_nothing_of_a_private_image(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """libtiff writes about damage past Python, also where it can go on."""
    content = io.BytesIO()
    dots = np.random.default_rng(0).random((32, 32)) < 0.5
    Image.fromarray(dots).save(content, "TIFF", compression="group4")
    spoilt = bytearray(content.getvalue())
    spoilt[8] ^= 0x55
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.tif").write_bytes(spoilt)
    load_images(tmp_path, "public")
    assert "Bad code word" in capfd.readouterr().err
    assert len(load_images(tmp_path, "private", show_paths=False)) == 1
    print("still there", file=sys.stderr)
    assert capfd.readouterr().err == "still there\n"


def test_a_tar_with_samples_that_are_not_one_image(tmp_path: Path) -> None:
    for number, names in enumerate((("a.png", "a.jpg"), ("a.cls",))):
        path = tmp_path / f"{number}.tar"
        with tarfile.open(path, "w") as archive:
            for name in names:
                content = some().png(0)
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        with pytest.raises(InputError, match="a sample needs exactly one image"):
            load_images(path, "private", show_paths=False)


def test_arguments_of_other_formats(tmp_path: Path) -> None:
    made = some()
    table, folder = as_binary_parquet(made, tmp_path / "p"), tmp_path / "folder"
    made.write(folder, made.names)
    for path, how, field in (
        (table, {"people": PeopleFrom()}, "unit_folders"),
        (folder, {"people": PeopleFrom("who")}, "unit_column"),
        (folder, {"label_column": "kind"}, "label_column"),
        (table, {"label_column": "missing"}, "label_column"),
        (as_npz(made, tmp_path / "n"), {"label_column": "missing"}, "label_column"),
    ):
        with pytest.raises(InputError) as caught:
            load_images(path, "private", **how)
        assert caught.value.field == field
