"""Declared classes: the list does not depend on which labels occur; and what messages tell of private files."""

from __future__ import annotations

import re
import struct
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rapid.data import load_images
from rapid.data.classes import read_classes
from rapid.errors import InputError

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (50, 28, 28), np.uint8)
LABELS = np.append(np.arange(49) % 9, 9)
"""Only the last image is of class 9."""
TEN = tuple("0123456789")


def npz(path: Path, count: int, **arrays: object) -> Path:
    np.savez(path, images=IMAGES[:count], labels=LABELS[:count], **arrays)  # type: ignore[arg-type]
    return path


def folder(path: Path, **files: list[str]) -> Path:
    """Sub-folders with images of these names."""
    number = 0
    for name, names in files.items():
        (path / name).mkdir(parents=True)
        for file in names:
            Image.fromarray(IMAGES[number]).save(path / name / f"{file}.png")
            number += 1
    return path


def test_one_image_decides_nothing_where_classes_are_declared(tmp_path: Path) -> None:
    with_it, without = npz(tmp_path / "a.npz", 50), npz(tmp_path / "b.npz", 49)
    sets = [load_images(path, "private", TEN) for path in (with_it, without)]
    assert [one.classes for one in sets] == [TEN, TEN]
    assert all(one.declared for one in sets)
    # by default the labels decide, and the set says so
    assert [len(load_images(path, "private").classes) for path in (with_it, without)] == [10, 9]
    assert not load_images(with_it, "private").declared
    named = [npz(tmp_path / f"{count}.npz", count, classes=np.array(TEN)) for count in (50, 49)]
    assert [(one.classes, one.declared) for one in (load_images(path, "private") for path in named)] == [
        (TEN, True)
    ] * 2


def test_an_empty_sub_folder_is_a_class(tmp_path: Path) -> None:
    path = folder(tmp_path / "f", a=["1", "2"], b=["anna"])
    before = load_images(path, "private")
    (path / "b" / "anna.png").unlink()
    after = load_images(path, "private")
    assert before.classes == after.classes == ("a", "b")
    assert after.declared
    assert after.labels is not None
    assert after.labels.tolist() == [0, 0]
    assert load_images(path, "public").classes == ("a", "b")
    for name in "12":
        (path / "a" / f"{name}.png").unlink()
    with pytest.raises(InputError, match="has no images"):
        load_images(path, "private")
    folder(path / "a", anna=["1"])
    with pytest.raises(
        InputError, match=r"'a/anna' has images deeper .* add --unit-folders if the folders in it are people"
    ):
        load_images(path, "private")


def test_declared_classes_have_their_order(tmp_path: Path) -> None:
    path = folder(tmp_path / "f", a=["1", "2"], c=["3"])
    found = load_images(path, "private", ["c", "b", "a"])
    assert found.classes == ("c", "b", "a")
    assert found.labels is not None
    assert found.labels.tolist() == [2, 2, 0]
    # an .npz with names is matched by name, one without by number
    np.savez(tmp_path / "n.npz", images=IMAGES[:3], labels=np.array([0, 0, 1]), classes=np.array(["a", "c"]))
    named = load_images(tmp_path / "n.npz", "private", ["c", "b", "a"])
    assert (named.classes, (named.labels == found.labels).all()) == (("c", "b", "a"), True)
    np.savez(tmp_path / "m.npz", images=IMAGES[:3], labels=np.array([2, 2, 0]))
    numbered = load_images(tmp_path / "m.npz", "private", ["c", "b", "a"])
    assert (numbered.classes, (numbered.labels == found.labels).all()) == (("c", "b", "a"), True)


def test_what_is_not_declared_is_refused_in_the_same_words_whatever_it_is(tmp_path: Path) -> None:
    said = set()
    for number, labels in enumerate(([0, 5, 1], [2, 2, 2], [0, 1, 10**9])):
        np.savez(tmp_path / "x.npz", images=IMAGES[:3], labels=np.array(labels))
        with pytest.raises(InputError) as caught:
            load_images(tmp_path / "x.npz", "private", ["a", "b"], show_paths=False)
        said.add(str(caught.value))
        assert caught.value.exit_code == 2
        path = folder(tmp_path / str(number), a=["1"], **{f"secret{number}": ["2"]})
        with pytest.raises(InputError, match=r"is not among --classes; add it .*; rerun") as refused:
            load_images(path, "private", ["a", "b"], show_paths=False)
        assert "secret" not in str(refused.value)
        with pytest.raises(InputError, match=f"'secret{number}'"):
            load_images(path, "private", ["a", "b"])
    assert len(said) == 1
    names = np.array(["a", "hidden"])
    np.savez(tmp_path / "x.npz", images=IMAGES[:2], labels=np.array([0, 1]), classes=names)
    with pytest.raises(InputError) as caught:
        load_images(tmp_path / "x.npz", "private", ["a", "b"], show_paths=False)
    assert "hidden" not in str(caught.value)


def test_unlabelled_images_have_no_classes_to_declare(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", images=IMAGES[:3])
    assert load_images(tmp_path / "x.npz", "private").declared
    with pytest.raises(InputError, match="has no labels"):
        load_images(tmp_path / "x.npz", "private", ["a"])


def test_ways_to_declare(tmp_path: Path) -> None:
    assert read_classes("a, b,c") == ("a", "b", "c")
    assert read_classes("alone,") == ("alone",)
    (tmp_path / "names.txt").write_text("cat, black\n\n  dog \n", encoding="utf-8-sig")
    assert read_classes(str(tmp_path / "names.txt")) == ("cat, black", "dog")
    assert read_classes(str(folder(tmp_path / "f", b=[], a=["1"]))) == ("a", "b")


@pytest.mark.parametrize("value", ["missing.txt", "a,,b", ",", "a,b,a", "{tmp}/empty.txt", "{tmp}/image.png", "{tmp}"])
def test_bad_declarations(tmp_path: Path, value: str) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    Image.fromarray(IMAGES[0]).save(tmp_path / "image.png")
    with pytest.raises(InputError) as caught:
        read_classes(value.format(tmp=tmp_path))
    assert caught.value.field == "classes"
    assert "\n" not in str(caught.value)


def other_size(path: Path) -> None:
    Image.fromarray(IMAGES[9][:27]).save(path)


def other_colour(path: Path) -> None:
    Image.fromarray(np.stack([IMAGES[9]] * 3, -1)).save(path)


def deep(path: Path) -> None:
    Image.fromarray(np.zeros((28, 28), np.float32)).save(path, "TIFF")


def no_image(path: Path) -> None:
    path.write_text("anna-smith")


def dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone.png"))


def too_large(path: Path) -> None:
    """A PNG that says it has 10^9 pixels; Pillow refuses it with an error of its own kind."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", 40_000, 25_000, 8, 0, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")))


@pytest.mark.parametrize("spoil", [other_size, other_colour, deep, no_image, dangling, too_large])
def test_messages_about_private_images_name_no_file(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = folder(tmp_path / "set", class_a=["0", "1"], class_b=["anna-smith"])
    spoil(path / "class_b" / "anna-smith.png")
    with pytest.raises(InputError) as shown:
        load_images(path, "private")
    assert "anna-smith.png" in str(shown.value)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(InputError) as hidden:
        warnings.simplefilter("always")
        load_images(path, "private", show_paths=False)
    words = str(hidden.value)
    assert words.startswith(f"private {path}: ")
    assert words.endswith("; rerun with --show-paths for details")
    # neither names nor sizes
    assert not re.search(r"anna|class_|png|\d\dx\d\d|RGB,|28|27", words.replace(str(tmp_path), ""))
    assert not caught
    # nor in what a traceback would print
    assert "anna" not in "".join(traceback.format_exception(hidden.value))


def test_warnings_of_the_decoder_are_not_shown_for_private_images(tmp_path: Path) -> None:
    """Pillow warns about single files, such as one with half an EXIF tag."""
    Image.fromarray(IMAGES[0]).save(tmp_path / "anna.jpg", exif=b"Exif\0\0MM\0*\0\0\0\x08\0\x05")
    with pytest.warns(UserWarning, match="EXIF"):
        load_images(tmp_path, "public")
    assert len(load_images(tmp_path, "private", show_paths=False)) == 1


def test_damaged_archives_tell_nothing_of_their_content(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    np.savez_compressed(file, images=IMAGES, labels=LABELS)
    good = file.read_bytes()
    for place in (200, 2000, len(good) // 2):
        file.write_bytes(good[:place] + bytes(64) + good[place + 64 :])
        with pytest.raises(InputError, match=r"damaged or not an \.npz") as caught:
            load_images(file, "private", show_paths=False)
        # the decoder's own error, which holds bytes of the file, is not told with ours
        assert "".join(traceback.format_exception(caught.value)).count("Error: ") == 1
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("anna.npy", b"")
    with pytest.raises(InputError, match="has no array 'images'") as caught:
        load_images(file, "private", show_paths=False)
    assert "anna" not in str(caught.value)


@pytest.mark.parametrize("name", ["classes", "labels"])
def test_arrays_of_python_objects_are_named(tmp_path: Path, name: str) -> None:
    """What `numpy.savez` makes of a column of pandas; such an array could hold a program."""
    arrays = {"images": IMAGES, "labels": LABELS, "classes": np.array(["cat", "dog", "fox"])}
    np.savez(tmp_path / "x.npz", **(arrays | {name: arrays[name].astype(object)}))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"the array '{name}' holds Python objects; write it as an array of strings"):
        load_images(tmp_path / "x.npz", "public")
    sizes = np.empty(2, object)
    sizes[:] = [np.zeros((4, 4), np.uint8), np.zeros((5, 5), np.uint8)]
    np.savez(tmp_path / "x.npz", images=sizes)
    with pytest.raises(InputError, match="'images' is object, expected uint8"):
        load_images(tmp_path / "x.npz", "public")
