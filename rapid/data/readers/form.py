"""The form of all images: 8 bits a channel, grey or RGB, upright. Each image is brought to it by itself.

| an image that                | becomes                                                   |
|------------------------------|-----------------------------------------------------------|
| has an EXIF orientation      | turned or mirrored as the tag says                        |
| is grey of 16 bits a channel | grey of 8 bits: v * 255 / 65535, rounded                  |
| is RGB of 16 bits a channel  | RGB of 8 bits: the high bytes, which is all Pillow reads  |
| has transparency             | laid on black, as the padding of `image.fit=pad` is       |
| has a palette                | RGB, even if all its colours are grey                     |
| is CMYK, YCbCr, LAB or HSV   | RGB                                                       |
| has one bit a pixel          | grey, 0 or 255                                            |
| has several frames or pages  | the first of them                                         |
| has 32 bits a channel        | refused: it has no range                                  |
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rapid.data.origin import KEYWORD, Origin, origins_in

TURNED, DEEP, CLEAR, PALETTE, SPACE = (
    "turned as their EXIF tag says",
    "of 16 bits a channel, now of 8 (65535 is white)",
    "with transparency, now on black",
    "with a palette, now RGB",
    "of another colour space, now RGB",
)
CHANGES = (TURNED, DEEP, CLEAR, PALETTE, SPACE)
ORIENTATION = 0x0112
"""Number of the EXIF tag."""
PHOTOMETRIC, WHITE_IS_ZERO = 262, 0
"""A tag of TIFF files, and its value for negatives. Pillow inverts those of 8 bits only."""
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What makes an image upright, by the value of the tag."""
TAGGED = ("exif", "xmp", "XML:com.adobe.xmp")
"""Where an image that was opened may have the tag, or XMP that says the same."""
SIDEWAYS = (5, 6, 7, 8)
"""Values of the tag that exchange width and height."""
GREY = ("1", "L", "LA", "La")
"""Modes without colour."""
SIXTEEN = ("PNG", "PPM")
"""Formats whose images of mode I have 16 bits."""


class TooDeepError(ValueError):
    """An image has 32 bits a channel."""


class Formed(NamedTuple):
    """An image in the common form."""

    pixels: NDArray[np.uint8]
    """(H, W) or (H, W, 3)."""
    changes: tuple[str, ...]
    """What was done, of CHANGES."""
    origins: tuple[Origin, ...] = ()
    """The private models that made the image, if it says so."""


def to_form(image: Image.Image) -> Formed:
    """Bring an image to the common form; it depends on nothing but the image.

    Args:
        image: as it was opened.

    Raises:
        TooDeepError: it has more than 16 bits a channel.
        Exception: of any kind, if it is damaged.
    """
    kind = image.format
    image.load()
    text = image.info.get(KEYWORD)
    origins = origins_in(text) if isinstance(text, str) else ()
    changes = []
    if (turn := TURNS.get(_orientation(image))) is not None:
        image = image.transpose(turn)
        changes.append(TURNED)
    if image.mode.startswith("I;16") or (image.mode == "I" and kind in SIXTEEN):
        changes.append(DEEP)
        wide = np.asarray(image).astype(np.uint32)
        if kind == "TIFF" and image.tag_v2.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # type: ignore[attr-defined]
            wide = 65535 - wide
        if isinstance(clear := image.info.get("transparency"), int):
            changes.append(CLEAR)
            wide = np.where(wide == clear, 0, wide)
        return Formed(((wide * 255 + 32767) // 65535).astype(np.uint8), tuple(changes), origins)
    if image.mode in ("I", "F"):
        raise TooDeepError
    if image.mode in ("P", "PA"):
        changes.append(PALETTE)
    elif image.mode in ("CMYK", "YCbCr", "LAB", "HSV"):
        changes.append(SPACE)
    if image.has_transparency_data:
        changes.append(CLEAR)
        image = _on_black(image.convert("LA" if image.mode in GREY else "RGBA"))
    pixels = np.asarray(image.convert("L" if image.mode in GREY else "RGB"), np.uint8)
    return Formed(pixels, tuple(changes), origins)


def shape_of(image: Image.Image) -> tuple[int, ...]:
    """The shape that an image, as it was opened, has in the common form: (H, W) or (H, W, 3). Its pixels are not read.

    Raises:
        Exception: of any kind, if it is damaged.
    """
    width, height = image.size
    # of a TIFF the size is that of the upright image; a PNG would be decoded to look for a tag behind its pixels
    tagged = image.format != "TIFF" and any(name in image.info for name in TAGGED)
    if tagged and _orientation(image) in SIDEWAYS:
        width, height = height, width
    grey = image.mode in GREY or image.mode.startswith("I")
    return (height, width) if grey else (height, width, 3)


def describe(shape: tuple[int, ...]) -> str:
    """Size and colour mode of images (H, W) or (H, W, 3), such as "32x24 RGB"."""
    return f"{shape[1]}x{shape[0]} {'grey' if len(shape) == 2 else 'RGB'}"


def _on_black(image: Image.Image) -> Image.Image:
    """An image of mode LA or RGBA without its transparency."""
    colours, opacity = image.convert(image.mode[:-1]), image.getchannel("A")
    return Image.composite(colours, Image.new(colours.mode, colours.size), opacity)


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except MemoryError:
        raise
    except Exception:  # a damaged tag says nothing, and the image can be read
        return 1
