"""Where a command writes, and where it reads."""

from __future__ import annotations

from pathlib import Path

from rapid.errors import InputError
from rapid.files import check_name


def check_outside(out: Path, images: Path, field: str) -> None:
    """Refuse an output among the images that are read: it would be taken for a class, or for images, next time.

    Args:
        out: of --out; need not exist.
        images: a set; nothing lies in one that is a file, or is not there.
        field: name of the argument that gave it.

    Raises:
        InputError: see above; or `out` is too long a name.
    """
    check_name(out, "out")
    if not images.is_dir():
        return
    real = out.resolve()
    # compared as the system does: a folder may have several names without links, too
    if any(place.exists() and place.samefile(images) for place in (real, *real.parents)):
        raise InputError("out", f"lies inside --{field.replace('_', '-')}; choose a folder outside of it", out)
