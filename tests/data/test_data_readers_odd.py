"""Sets that would be read wrongly without a word, and content that no parser should be given."""

from __future__ import annotations

import gzip
import io
import json
import os
import tarfile
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pyarrow import parquet
from tests_sets import Made, some, write_lines

from rapid.data import load_images
from rapid.data.canvas import Canvas
from rapid.data.classes import read_classes
from rapid.data.units import PeopleFrom
from rapid.errors import InputError

DEEP = "[" * 100_000


def tar(made: Made, *more: tarfile.TarInfo) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for number, name in enumerate(made.names):
            content = made.png(number)
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in more:
            archive.addfile(member)
    return stream.getvalue()


@pytest.mark.parametrize("packed", [False, True])
def test_a_tar_that_ends_early_is_refused_wherever_it_ends(tmp_path: Path, packed: bool) -> None:
    whole = tar(some())
    end = len(whole.rstrip(b"\0"))
    cuts = [*range(0, end, 512), *range(100, end, 512)]
    path = tmp_path / ("set.tar.gz" if packed else "set.tar")
    for cut in cuts:
        path.write_bytes(gzip.compress(whole[:cut], 1) if packed else whole[:cut])
        with pytest.raises(InputError, match="is damaged, ends early"):
            load_images(path, "public")
    path.write_bytes(gzip.compress(whole) if packed else whole)
    assert len(load_images(path, "public")) == len(some().images)


def test_a_tar_with_a_damaged_header_is_refused(tmp_path: Path) -> None:
    whole, path = tar(some()), tmp_path / "set.tar"
    places = [place for place in range(0, len(whole), 512) if whole[place + 257 : place + 262] == b"ustar"]
    assert len(places) == len(some().images)
    for place in places:
        path.write_bytes(whole[: place + 3] + bytes([whole[place + 3] ^ 1]) + whole[place + 4 :])
        with pytest.raises(InputError, match="is damaged"):
            load_images(path, "public")


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_a_tar_with_links_is_refused(tmp_path: Path, kind: bytes) -> None:
    link = tarfile.TarInfo("900.png")
    link.type, link.linkname = kind, "000.png"
    (tmp_path / "set.tar").write_bytes(tar(some(), link))
    with pytest.raises(InputError, match="holds a link"):
        load_images(tmp_path / "set.tar", "public")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["L", "RGB", "RGBA", "I;16"])
def test_a_file_is_read_as_its_bytes_are(tmp_path: Path, kind: str, orientation: int) -> None:
    """Of an uncompressed TIFF that lies on its side; Pillow maps it if it is opened by name."""
    rng = np.random.default_rng(0)
    if kind == "I;16":
        made: NDArray[Any] = rng.integers(0, 65536, (4, 6)).astype(np.uint16)
    else:
        made = rng.integers(0, 256, (4, 6, *{"L": (), "RGB": (3,), "RGBA": (4,)}[kind]), np.uint8)
    (tmp_path / "set").mkdir()
    Image.fromarray(made).save(tmp_path / "set" / "0.tif", tiffinfo={274: orientation})
    content = (tmp_path / "set" / "0.tif").read_bytes()
    parquet.write_table(pa.table({"image": [content]}), tmp_path / "set.parquet")
    found = load_images(tmp_path / "set", "public").images
    assert np.array_equal(found, load_images(tmp_path / "set.parquet", "public").images)
    assert found.shape[1:3] == ((6, 4) if orientation > 4 else (4, 6))


def test_people_are_the_same_in_every_format(tmp_path: Path) -> None:
    images = np.zeros((3, 2, 2), np.uint8)
    np.savez(tmp_path / "set.npz", images=images, who=np.array([" x", "x", "x "]))
    found = load_images(tmp_path / "set.npz", "private", people=PeopleFrom("who"))
    assert found.units is not None
    assert found.units.tolist() == [0, 0, 0]
    np.savez(tmp_path / "set.npz", images=images, who=np.array([" ", "y", "x"]))
    with pytest.raises(InputError, match="has an empty entry"):
        load_images(tmp_path / "set.npz", "private", people=PeopleFrom("who"))


def test_a_number_of_a_person_is_one_number_however_it_is_written(tmp_path: Path) -> None:
    """As spreadsheets do: taken for two, a person would have half of the protection."""
    for folder, who in (("train", "7"), ("test", "7.0"), ("val", "07")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.png").write_bytes(some().png(0))
        (tmp_path / folder / "metadata.csv").write_text(f"file_name,label,who\n0.png,a,{who}\n")
    found = load_images(tmp_path, "private", people=PeopleFrom("who"))
    assert found.unit_count == 1


@pytest.mark.parametrize("written", ["NFC", "NFD"])
def test_accents_of_folders_may_be_written_in_two_ways(tmp_path: Path, written: Any) -> None:
    folder, plain = unicodedata.normalize(written, "é"), unicodedata.normalize("NFC", "é")
    for part in ("train", "test"):
        for name in (folder if part == "train" else plain, "b"):
            (tmp_path / "split" / part / name).mkdir(parents=True)
            (tmp_path / "split" / part / name / "0.png").write_bytes(some().png(0))
    assert load_images(tmp_path / "split", "public").classes == ("b", plain)
    table = tmp_path / "table"
    (table / folder).mkdir(parents=True)
    (table / folder / "0.png").write_bytes(some().png(0))
    for name in (folder, plain):
        (table / "metadata.csv").write_text(f"file_name,label\n{name}/0.png,a\n", encoding="utf-8")
        assert len(load_images(table, "public")) == 1
    assert read_classes(str(tmp_path / "split" / "train")) == ("b", plain)


def test_tables_that_name_no_files_do_not_hide_class_folders(tmp_path: Path) -> None:
    """Also where no labels are asked for, as for an account of the ledger."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").write_bytes(some().png(0))
    (tmp_path / "metadata.csv").write_text("site,date\nx,1\n")
    for column in (None, "none"):
        assert len(load_images(tmp_path, "private", label_column=column)) == 2


def test_labels_in_a_tar_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    """Read with a sign in place of what cannot be read, two classes would be one."""
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        for name, content in (
            ("0.png", some().png(0)),
            ("0.cls", b"K\xe4"),
            ("1.png", some().png(1)),
            ("1.cls", b"K\xf6"),
        ):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    with pytest.raises(InputError, match="whole numbers or names"):
        load_images(tmp_path / "set.tar", "public")


def part(path: Path, names: Any, image: Any = b"") -> None:
    features = {"label": {"names": names, "_type": "ClassLabel"}}
    table = pa.table({"image": [image or some().png(0)], "label": [0]})
    path.parent.mkdir(exist_ok=True)
    parquet.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})}), path
    )


def test_parts_that_do_not_agree_are_refused(tmp_path: Path) -> None:
    part(tmp_path / "set" / "0.parquet", ["cat", "dog"])
    part(tmp_path / "set" / "1.parquet", ["dog", "cat"])
    with pytest.raises(InputError, match="number their classes differently"):
        load_images(tmp_path / "set", "public")
    part(tmp_path / "set" / "1.parquet", ["cat", "dog"], 7)
    with pytest.raises(InputError, match="have columns of different types"):
        load_images(tmp_path / "set", "public")
    part(tmp_path / "set" / "1.parquet", ["cat", "dog"])
    assert load_images(tmp_path / "set", "public").classes == ("cat", "dog")


def test_odd_tables_of_parquet_are_refused(tmp_path: Path) -> None:
    part(tmp_path / "a.parquet", {"a": "anna"})
    with pytest.raises(InputError, match="ClassLabel whose numbers are none") as caught:
        load_images(tmp_path / "a.parquet", "private", show_paths=False)
    assert "anna" not in str(caught.value)
    twice = pa.Table.from_arrays([pa.array([some().png(0)]), pa.array([0]), pa.array([1])], ["image", "label", "label"])
    parquet.write_table(twice, tmp_path / "b.parquet")
    with pytest.raises(InputError, match="two columns of the same name"):
        load_images(tmp_path / "b.parquet", "public")


def test_the_case_of_a_suffix_changes_nothing(tmp_path: Path) -> None:
    some().write(tmp_path, some().names)
    rows = [{"file_name": name, "label": "0007"} for name in some().names]
    for name in ("m.jsonl", "M.JSONL"):
        assert load_images(write_lines(tmp_path / name, rows), "public").classes == ("0007",)


def test_names_of_classes_are_text(tmp_path: Path) -> None:
    arrays = {"images": np.zeros((2, 2, 2), np.uint8), "labels": np.arange(2)}
    for classes, names in ((np.array([b"cat", b"dog"]), ("cat", "dog")), (np.array([3, 4]), ("3", "4"))):
        np.savez(tmp_path / "set.npz", **arrays, classes=classes)
        assert load_images(tmp_path / "set.npz", "public").classes == names
    for classes, words in ((np.array([b"\xff", b"a"]), "not UTF-8"), (np.array(["a", ""]), "an empty name")):
        np.savez(tmp_path / "set.npz", **arrays, classes=classes)
        with pytest.raises(InputError, match=words):
            load_images(tmp_path / "set.npz", "public")


def test_a_class_folder_in_another_encoding_is_refused(tmp_path: Path) -> None:
    for name in (b"caf\xe9", b"tea"):
        folder = os.path.join(os.fsencode(tmp_path), name)  # noqa: PTH118 - bytes
        os.mkdir(folder)  # noqa: PTH102
        Path(os.fsdecode(folder), "0.png").write_bytes(some().png(0))
    with pytest.raises(InputError, match="name is not UTF-8"):
        load_images(tmp_path, "public")


def test_transparent_grey_of_sixteen_bits_is_black(tmp_path: Path) -> None:
    pixels = np.array([[0, 40_000], [40_000, 65_535]], np.uint16)
    Image.fromarray(pixels).save(tmp_path / "0.png", transparency=40_000)
    found = load_images(tmp_path, "public")
    assert found.images[0].tolist() == [[0, 0], [0, 255]]
    assert any("with transparency" in note for note in found.notes)


def test_an_orientation_in_xmp_counts(tmp_path: Path) -> None:
    """Also for the common size of all images, of which the headers alone are read."""
    xmp = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    xmp += '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
    told = PngInfo()
    told.add_itxt("XML:com.adobe.xmp", xmp)
    pixels = np.random.default_rng(0).integers(0, 256, (8, 16), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "0.png", pnginfo=told)
    Image.fromarray(pixels.T).save(tmp_path / "1.png")
    found = load_images(tmp_path, "public", target=Canvas(64, 64, "contain")).images
    assert found.shape == (2, 16, 8)
    assert np.array_equal(found[0], np.rot90(pixels, -1))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    some().write(tmp_path, some().names)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(InputError, match=r"pipe\.png: is not a readable image"):
        load_images(tmp_path, "public")


def test_deep_json_is_an_error_of_the_file(tmp_path: Path) -> None:
    some().write(tmp_path / "set", some().names)
    (tmp_path / "set" / "metadata.jsonl").write_text(f'{{"file_name": {DEEP}')
    with pytest.raises(InputError, match="cannot be read"):
        load_images(tmp_path / "set", "public")
    content = DEEP.encode()
    member = tarfile.TarInfo("0.json")
    member.size = len(content)
    with tarfile.open(tmp_path / "set.tar", "w") as archive:
        archive.addfile(member, io.BytesIO(content))
    with pytest.raises(InputError, match="is not a JSON object"):
        load_images(tmp_path / "set.tar", "public")
