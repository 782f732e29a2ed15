"""Reading, joining, fitting and splitting images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rapid.config.sections import ImageSettings, SplitSettings
from rapid.data import ImageSet, fit_images, join, load_images, sample_path, split_indices, to_uint8, to_unit_range
from rapid.errors import InputError

RNG = np.random.default_rng(0)


def pixels(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return RNG.integers(0, 256, shape, np.uint8)


def save(path: Path, *shape: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(*shape)).save(path)


def test_folder_with_classes(tmp_path: Path) -> None:
    for name, count in (("cat", 2), ("ant", 3)):
        for number in range(count):
            save(tmp_path / name / f"{number}.png", 5, 4)
    save(tmp_path / "cat" / ".hidden.png", 9, 9)
    found = load_images(tmp_path, "public")
    assert found.images.shape == (5, 5, 4)
    assert found.classes == ("ant", "cat")
    assert found.labels is not None
    assert found.labels.tolist() == [0, 0, 0, 1, 1]
    assert (found.images[3] == np.asarray(Image.open(tmp_path / "cat" / "0.png"))).all()


def test_flat_folder_of_rgb_is_unlabelled(tmp_path: Path) -> None:
    save(tmp_path / "a.png", 4, 4, 3)
    save(tmp_path / "b.png", 4, 4, 3)
    found = load_images(tmp_path, "public")
    assert found.images.shape == (2, 4, 4, 3)
    assert found.labels is None
    assert found.channels == 3


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:60])


def make_bad_folder(path: Path, case: str) -> None:
    save(path / "a" / "0.png", 32, 32)
    if case == "size":
        save(path / "a" / "1.png", 31, 32)
    elif case == "colour":
        save(path / "a" / "1.png", 32, 32, 3)
    elif case == "truncated":
        truncate(path / "a" / "0.png")
    elif case == "text":
        (path / "a" / "1.png").write_text("no image")
    elif case == "loose":
        save(path / "1.png", 32, 32)
    elif case == "32 bit":
        Image.fromarray(np.zeros((32, 32), np.float32)).save(path / "a" / "1.tif")


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("size", "1.png is 32x31 grey, expected 32x32 grey"),
        ("colour", "1.png is 32x32 RGB, expected 32x32 grey"),
        ("truncated", "0.png: is not a readable image"),
        ("text", "1.png: is not a readable image"),
        ("loose", "both images and sub-folders"),
        ("32 bit", "more than 16 bits"),
    ],
)
def test_bad_folders(tmp_path: Path, case: str, words: str) -> None:
    make_bad_folder(tmp_path, case)
    with pytest.raises(InputError) as caught:
        load_images(tmp_path, "public")
    assert caught.value.field == "public"
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"private .*does not exist"):
        load_images(tmp_path / "nothing", "private")
    with pytest.raises(InputError, match="has no images"):
        load_images(tmp_path, "private")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(InputError, match="is none of these: a folder of images"):
        load_images(tmp_path / "a.txt", "private")


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"pictures": pixels(2, 4, 4)}, "no array 'images'"),
        ({"images": np.zeros((2, 4, 4))}, "float64, expected uint8"),
        ({"images": pixels(2, 4)}, "expected (N, H, W)"),
        ({"images": pixels(2, 4, 4, 4)}, "expected (N, H, W)"),
        ({"images": pixels(0, 4, 4)}, "has no images"),
        ({"images": pixels(2, 4, 4), "labels": np.zeros(3, int)}, "expected (2,)"),
        ({"images": pixels(2, 4, 4), "labels": np.zeros(2)}, "expected integers"),
        ({"images": pixels(2, 4, 4), "labels": np.array([0, 2]), "classes": np.array(["a", "b"])}, "0..1"),
        ({"images": pixels(2, 4, 4), "labels": np.array([0, -1])}, "must be at least 0"),
        ({"images": pixels(2, 4, 4), "labels": np.array([0, 1]), "classes": np.array(["a", "a"])}, "twice"),
    ],
)
def test_bad_npz(tmp_path: Path, arrays: dict[str, np.ndarray], words: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError) as caught:
        load_images(tmp_path / "a.npz", "private")
    assert (caught.value.field, caught.value.value) == ("private", tmp_path / "a.npz")
    assert words in str(caught.value)


def test_damaged_npz(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    for content in (b"", b"not a zip", b"PK\x03\x04 half"):
        file.write_bytes(content)
        with pytest.raises(InputError, match=r"damaged or not an \.npz"):
            load_images(file, "private")
    np.savez(file, images=pixels(50, 9, 9))
    truncate(file)
    with pytest.raises(InputError, match="damaged"):
        load_images(file, "private")
    np.savez(file, images=np.array([{"pickled": 1}], object))
    with pytest.raises(InputError, match="damaged"):
        load_images(file, "private")


def test_one_channel_axis_is_dropped_and_classes_are_numbered(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", images=pixels(3, 4, 4, 1), labels=np.array([0, 2, 0]))
    found = load_images(tmp_path / "a.npz", "private")
    assert found.images.shape == (3, 4, 4)
    assert found.classes == ("0", "1", "2")


def labelled(count: int, names: tuple[str, ...], source: str, side: int = 4) -> ImageSet:
    return ImageSet(pixels(count, side, side), np.arange(count) % len(names), names, source)


def test_join_keeps_classes_apart() -> None:
    first, second = labelled(3, ("a", "b"), "x/letters.npz"), labelled(2, ("b", "c"), "y/other.npz")
    both = join([first, second], "public")
    assert both.classes == ("letters/a", "letters/b", "other/b", "other/c")
    assert both.labels is not None
    assert both.labels.tolist() == [0, 1, 0, 2, 3]
    assert join([first, labelled(1, ("c",), "z")], "public").classes == ("a", "b", "c")
    assert len(set(join([first, first], "public").classes)) == 4
    with pytest.raises(InputError, match="some sets are labelled"):
        join([first, ImageSet(pixels(2, 4, 4), None, (), "u")], "public")
    with pytest.raises(InputError, match="differ in size"):
        join([first, labelled(1, ("q",), "w", 5)], "public")


@settings(max_examples=30, deadline=None)
@given(height=st.integers(1, 8), width=st.integers(1, 8), size=st.integers(8, 11))
def test_padding_is_centred_and_changes_nothing_else(height: int, width: int, size: int) -> None:
    images = ImageSet(pixels(2, height, width), None, ())
    fitted = fit_images(images, ImageSettings(size=size), "public").images
    top, left = (size - height) // 2, (size - width) // 2
    assert (fitted[:, top : top + height, left : left + width] == images.images).all()
    assert fitted.sum() == images.images.sum()


def test_fitting_channels_and_size() -> None:
    grey, colour = ImageSet(pixels(2, 6, 6), None, ()), ImageSet(pixels(2, 6, 6, 3), None, ())
    as_colour = fit_images(grey, ImageSettings(size=6, channels=3), "-").images
    assert (as_colour == grey.images[..., None]).all()
    as_grey = fit_images(colour, ImageSettings(size=6), "-").images
    by_pillow = np.stack([np.asarray(Image.fromarray(image).convert("L")) for image in colour.images])
    assert abs(as_grey.astype(int) - by_pillow).max() <= 1
    resized = fit_images(colour, ImageSettings(size=12, channels=3, fit="resize"), "-").images
    assert resized.shape == (2, 12, 12, 3)
    with pytest.raises(InputError, match=r"image\.fit=resize"):
        fit_images(grey, ImageSettings(size=5), "private")


@pytest.mark.parametrize("shape", [(3, 5, 4), (3, 5, 4, 3)])
def test_unit_range_round_trip(shape: tuple[int, ...]) -> None:
    images = pixels(*shape)
    tensor = to_unit_range(images)
    assert tensor.shape == (3, 1 if len(shape) == 3 else 3, 5, 4)
    assert tensor.min() >= -1
    assert tensor.max() <= 1
    assert (to_uint8(tensor) == images).all()
    assert to_uint8(torch.full((1, 1, 1, 2), 9.0)).tolist() == [[[255, 255]]]


@settings(max_examples=50, deadline=None)
@given(count=st.integers(2, 300), share=st.floats(0.05, 0.95), seed=st.integers(0, 5))
def test_split_is_disjoint_complete_and_reproducible(count: int, share: float, seed: int) -> None:
    chosen = SplitSettings(reference=share, seed=seed)
    if not 0 < round(count * share) < count:
        with pytest.raises(InputError, match="public"):
            split_indices(count, chosen)
        return
    pre, reference = split_indices(count, chosen)
    assert sorted([*pre, *reference]) == list(range(count))
    assert len(reference) == round(count * share)
    assert (split_indices(count, chosen)[0] == pre).all()


def test_bundled_samples() -> None:
    letters, digits = (load_images(sample_path(name), name) for name in ("letters", "digits"))
    assert letters.images.shape == digits.images.shape == (10_000, 28, 28)
    assert digits.classes == tuple("0123456789")
    assert letters.classes == tuple("ABCDEFGHIJKLM")
    assert sum(sample_path(name).stat().st_size for name in ("letters", "digits")) < 5_000_000
    assert not {image.tobytes() for image in letters.images} & {image.tobytes() for image in digits.images}
