"""PNG encoding, grids of images, and captioned tables of images."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

Pixels = NDArray[np.uint8]
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NONE, _UP = 0, 2
"""Filters of PNG rows: as they are, and differences from the row above."""
_SHEET = 1 << 16
"""Bytes of pixels above which a picture is a sheet, which repeats itself."""
CAPTION = 40
"""Most characters of a class name in a picture."""


def encode_png(image: Pixels, text: Mapping[str, str] | None = None) -> bytes:
    """Encode an image as PNG, without loss. Equal arguments give equal bytes.

    Small images take less than half of Pillow's time, and the files are at most a fifth larger: one filter for all
    rows, and runs instead of a search for repetitions. Other threads run while zlib compresses.

    Args:
        image: uint8 (H, W) or (H, W, 3), H and W >= 1.
        text: text chunks by their keywords; a keyword is Latin-1, 1..79 characters.

    Raises:
        ValueError: not such an image.
    """
    if image.dtype != np.uint8 or image.ndim not in (2, 3) or image.shape[2:] not in ((), (3,)) or not image.size:
        raise ValueError(f"should be uint8 (H, W) or (H, W, 3), not {image.dtype} {image.shape}")
    height, width = image.shape[:2]
    pixels = image.reshape(height, -1)
    sheet, colour = image.size > _SHEET, image.ndim == 3
    rows = np.empty((height, 1 + pixels.shape[1]), np.uint8)
    rows[:, 1:] = pixels
    if sheet or colour:
        rows[:, 0] = _UP
        rows[1:, 1:] -= pixels[:-1]
    else:
        rows[:, 0] = _NONE
    packer = zlib.compressobj(strategy=zlib.Z_DEFAULT_STRATEGY if sheet else zlib.Z_RLE)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if colour else 0, 0, 0, 0)
    packed = packer.compress(rows.tobytes()) + packer.flush()
    chunks = _text_chunks(tuple((text or {}).items()))
    return b"".join((_SIGNATURE, _chunk(b"IHDR", header), chunks, _chunk(b"IDAT", packed), _chunk(b"IEND", b"")))


@lru_cache(maxsize=64)
def _text_chunks(text: tuple[tuple[str, str], ...]) -> bytes:
    """Text chunks; all images of a model have the same."""
    # iTXt: names of models and classes may be any Unicode text
    return b"".join(_chunk(b"iTXt", name.encode("latin-1") + bytes(5) + words.encode()) for name, words in text)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(content, zlib.crc32(kind)))


def grid(images: Pixels, columns: int | None = None, gap: int = 2) -> Pixels:
    """Arrange images row by row on a dark background.

    Args:
        images: uint8 (N, H, W) or (N, H, W, 3), N >= 1.
        columns: images per row; None makes the grid about square.
        gap: pixels between images.

    Returns:
        uint8 (rows * (H + gap) - gap, columns * (W + gap) - gap[, 3]).
    """
    count, height, width = images.shape[:3]
    columns = min(columns or math.ceil(math.sqrt(count)), count)
    rows = math.ceil(count / columns)
    sheet = np.full((rows * (height + gap) - gap, columns * (width + gap) - gap, *images.shape[3:]), 32, np.uint8)
    for number, image in enumerate(images):
        row, column = divmod(number, columns)
        top, left = row * (height + gap), column * (width + gap)
        sheet[top : top + height, left : left + width] = image
    return sheet


def labelled_grid(images: Pixels, labels: NDArray[np.int64] | None, classes: Sequence[str], side: int = 64) -> Pixels:
    """Draw images by class, with the name of each class left of its first row; a plain grid without labels.

    Args:
        images: uint8 (N, H, W) or (N, H, W, 3), N >= 1.
        labels: int64 (N,), indices into `classes`; None if the images are unlabelled.
        classes: class names; those without images are left out.
        side: images are enlarged by a whole factor to at most this many pixels, if they are smaller.

    Returns:
        uint8 (height, width[, 3]).
    """
    scale = max(1, side // max(images.shape[1:3]))
    if labels is None:
        return grid(images.repeat(scale, 1).repeat(scale, 2))
    numbers, counts = np.unique(labels, return_counts=True)
    columns = min(int(counts.max()), max(10, math.ceil(math.sqrt(len(images)))))
    rows: list[tuple[str, Pixels]] = []
    for number in numbers.tolist():
        own = images[labels == number]
        for start in range(0, len(own), columns):
            rows.append(("" if start else one_line(classes[number]), own[start : start + columns]))
    return table(rows, scale=scale)


def table(rows: Sequence[tuple[str, Pixels]], columns: Sequence[str] = (), title: str = "", scale: int = 2) -> Pixels:
    """Draw rows of images on white, with a caption left of each row and, optionally, above each column.

    Args:
        rows: (caption, uint8 (N, H, W) or (N, H, W, 3)); H and W are equal in all rows, N may differ.
        columns: captions of the columns.
        title: a line at the top.
        scale: factor by which pixels are enlarged.

    Returns:
        uint8 (height, width, 3).
    """
    font = ImageFont.load_default(14)
    height, width = (side * scale for side in rows[0][1].shape[1:3])
    gap, line = 4, 22
    left = 16 + max(round(font.getlength(caption)) for caption, _ in rows)
    top = 8 + line * bool(title) + line * bool(columns)
    count = max(len(images) for _, images in rows)
    wide = max(left + count * (width + gap) + 8, 24 + round(font.getlength(title)))
    sheet = Image.new("RGB", (wide, top + len(rows) * (height + gap) + 8), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((8, 6), title, "black", font)
    for number, caption in enumerate(columns):
        middle = left + number * (width + gap) + width // 2
        draw.text((middle, top - 4), caption, "black", font, anchor="ms")
    for row, (caption, images) in enumerate(rows):
        y = top + row * (height + gap)
        draw.text((8, y + height // 2), caption, "black", font, anchor="lm")
        for number, image in enumerate(images):
            tile = Image.fromarray(image).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(tile, (left + number * (width + gap), y))
    return np.asarray(sheet)


def one_line(name: str) -> str:
    """A class name in one line of at most `CAPTION` characters."""
    line = " ".join(name.split())
    return line if len(line) <= CAPTION else line[: CAPTION - 3] + "..."
