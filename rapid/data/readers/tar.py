"""WebDataset tars: files with the same name up to the first dot are one sample, such as `0001.png` and `0001.cls`.

A sample has one image, and its label as text in `.cls` (or `.cls.txt`) or under a key of the object in `.json`; people
come from the same places. Tars are read once, from beginning to end, also compressed ones.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

from rapid.data.readers.columns import LABELS, check_people, label_column, people_column
from rapid.data.readers.decode import Encoded, decode
from rapid.data.readers.folder import is_image
from rapid.data.readers.labels import from_values, people_of
from rapid.data.readers.source import Records, Source
from rapid.data.readers.suffixes import TARS
from rapid.errors import DENIED
from rapid.parsing import parse_json

LABEL = "cls"
"""Suffix of the file with a sample's label."""
DAMAGED = "is damaged, ends early, or is not a tar"
LINKED = "holds a link; write the tar again with --dereference --hard-dereference"
FOLDERS = (
    "has samples in several folders and no labels (.cls, .json); unpack it if the folders are the classes, or add "
    "--label-column none"
)
COMPRESSED: tuple[tuple[re.Pattern[bytes], Callable[[Path], object]], ...] = (
    (re.compile(rb"\x1f\x8b\x08"), gzip.open),
    (re.compile(rb"BZh.1AY&SY", re.DOTALL), bz2.open),
    (re.compile(rb"\xfd7zXZ\0|\x5d\0\0\x80"), lzma.open),
)
"""How compressed files begin, whatever their name, and what opens them."""
BEGINNING = 10
"""Bytes that tell."""
BLOCK = 1 << 20
"""Bytes that are read at a time behind the end of a tar."""
Fields = dict[str, Any]
"""What a sample says besides its image, by suffix or by key of its JSON."""


class _Header(tarfile.TarInfo):
    """The header of a member. A damaged or missing one is an error, where `tarfile` would take it for the end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """See `tarfile.TarInfo.fromtarfile`."""
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            # the block of zeros at the end
            raise
        except tarfile.HeaderError:
            raise tarfile.ReadError(DAMAGED) from None


def has_tars(path: Path) -> bool:
    """Whether the path is a tar, or a folder with some in it."""
    return _is_tar(path) if path.is_file() else path.is_dir() and bool(_parts(path))


def read_tar(source: Source) -> Records:
    """Read tars; those of a folder are the parts of one set, in the order of their names.

    Raises:
        InputError: see `load_images`; or a sample has several images, or none.
    """
    paths = [source.path] if source.path.is_file() else _parts(source.path)
    fields: list[Fields] = []
    columns: dict[str, None] = {}
    folders: set[str] = set()
    kept = {LABEL, *LABELS, source.label_column, people_column(source)}

    def encoded() -> Iterator[Encoded]:
        # a second pass finds the same
        fields.clear()
        for path in paths:
            for key, images, found in _samples(path, source):
                if len(images) != 1:
                    problem = "needs exactly one image"
                    raise source.error(f"a sample {problem}", f"'{key}' {problem}, and has {len(images)}", path)
                columns.update(dict.fromkeys(found))
                folders.add(key.rpartition("/")[0])
                # captions of a million images need not be kept
                fields.append({name: value for name, value in found.items() if name in kept})
                yield Encoded(f"{path} {key}", images[0])

    records = decode(encoded, source)
    people = check_people(columns, source)
    others = [name for name in columns if name != "txt"]
    label = LABEL if source.label_column is None and LABEL in others else label_column(others, source)
    labels = units = None
    if label is None and source.label_column is None and len(folders) > 1:
        raise source.error(FOLDERS)
    if label is not None:
        labels = from_values([found.get(label) for found in fields], None, source, called=label)
    if people is not None:
        units = people_of([found.get(people) for found in fields], people)
    if len(paths) > 1:
        records = records._replace(notes=(*records.notes, f"read from {len(paths)} tars"))
    return records._replace(labels=labels, units=units)


def _is_tar(path: Path) -> bool:
    return path.name.lower().endswith(TARS)


def _parts(path: Path) -> list[Path]:
    return sorted(file for file in path.iterdir() if _is_tar(file) and file.is_file() and file.name[0] != ".")


def _samples(path: Path, source: Source) -> Iterator[tuple[str, list[bytes], Fields]]:
    """Name, images and fields of each sample."""
    current: str | None = None
    images: list[bytes] = []
    fields: Fields = {}
    for name, content in _members(path, source):
        folder, _, base = name.rpartition("/")
        stem, _, suffix = base.partition(".")
        key, suffix = f"{folder}/{stem}" if folder else stem, suffix.lower()
        if key != current:
            if current is not None:
                yield current, images, fields
            current, images, fields = key, [], {}
        if is_image(base):
            images.append(content)
        elif suffix == "json":
            fields |= _json(content, name, source, path)
        elif suffix.removesuffix(".txt").isidentifier():
            fields[suffix.removesuffix(".txt")] = _text(content)
    if current is not None:
        yield current, images, fields


def _text(content: bytes) -> str | bytes:
    """The text of a file; its bytes where it is none, which is an error if labels or people are looked for there."""
    try:
        return content.decode("utf-8").strip()
    except UnicodeDecodeError:
        # with a sign in place of what cannot be read, different labels could become one
        return content


def _members(path: Path, source: Source) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file, without hidden ones."""
    try:
        with _opened(path) as content, tarfile.open(fileobj=content, mode="r|", tarinfo=_Header) as archive:
            for member in archive:
                # a tar remembers all its members, a kilobyte each
                archive.members.clear()  # type: ignore[attr-defined]
                if member.name.rpartition("/")[2].startswith("."):
                    continue
                if member.issym() or member.islnk():
                    raise source.error(f"a tar {LINKED}", LINKED, path)
                if member.isfile():
                    stream = archive.extractfile(member)
                    assert stream is not None
                    yield member.name, stream.read()
            # the checksum of what was compressed comes last
            while content.read(BLOCK):
                pass
    except PermissionError:
        raise source.error(f"a file {DENIED}", DENIED, path) from None
    except (tarfile.TarError, OSError, EOFError, ValueError, zlib.error, lzma.LZMAError):
        raise source.error(f"a file {DAMAGED}", DAMAGED, path) from None


def _opened(path: Path) -> BinaryIO:
    """The tar as a stream. `tarfile` would decompress it, too, but without a look at gzip's checksum."""
    with path.open("rb") as stream:
        beginning = stream.read(BEGINNING)
    opened = next((opener for pattern, opener in COMPRESSED if pattern.match(beginning)), None)
    return path.open("rb") if opened is None else cast(BinaryIO, opened(path))


def _json(content: bytes, name: str, source: Source, path: Path) -> Fields:
    try:
        found = parse_json(content)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        problem = "is not a JSON object"
        raise source.error(f"a .json of a sample {problem}", f"'{name}' {problem}", path)
    return found
