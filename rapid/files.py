"""Atomic writes of files and folders, and content hashes."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rapid.errors import InputError

SHOWN = 40
"""Characters of a file's name in that of its temporary folder."""
SYNCED = 16
"""Files of a folder that are written to the disk at a time."""
QUEUED = 1024
"""Files that wait for it at a time: each takes two kilobytes of memory."""
NO_ROOM = {
    errno.ENOSPC: "free space there",
    errno.EDQUOT: "free space there",
    errno.EFBIG: "allow larger files there (ulimit -f)",
}
"""What helps where a file is not written in full, by the number of the error."""
TOO_LONG = "is a name that is too long for a file; choose a shorter one"
CUT_SHORT = re.compile("[0-9]+ requested and [0-9]+ written")
"""What numpy says of a file that is not written in full, whatever the reason."""


def check_folder(folder: Path, field: str, value: Path) -> None:
    """Refuse a folder in which nothing can be written, before any work is done. Nothing is left in it.

    Args:
        folder: need not exist, nor the folders above it, which `replacing` makes.
        field: name of the argument to blame.
        value: what was given for it.

    Raises:
        InputError: it, or the nearest folder above it that exists, is a file or cannot be written, or `value` is too
            long a name.
    """
    check_name(value, field)
    folder = folder.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise InputError(field, f"{folder} is not a folder; choose another name", value)
    try:
        # tried, because permissions do not tell of file systems that are read-only
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        problem = f"nothing can be written in {folder} ({error.strerror}); choose another name"
        raise InputError(field, problem, value) from None


def check_name(path: Path, field: str) -> None:
    """Refuse a path that no file can have: it, or a part of it, is longer than the file system allows.

    Args:
        path: need not exist.
        field: name of the argument to blame.

    Raises:
        InputError: see above.
    """
    there = path = path.absolute()
    while not os.path.lexists(there):
        there = there.parent
    try:
        # in a folder that is there: where one is missing, this is told first
        for one in (path, *(there / part for part in path.relative_to(there).parts)):
            with contextlib.suppress(FileNotFoundError):
                one.lstat()
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InputError(field, TOO_LONG, path) from None


@contextmanager
def replacing(path: Path, *, new: str = "") -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; on a clean exit it replaces `path`.

    The block creates a file or a folder at the yielded path. A folder that is already at `path` is moved aside just
    before the rename, and removed after it. If the block raises, `path` is untouched and the temporary is removed.

    Args:
        path: to be replaced.
        new: name of the argument that gave `path`, if only an empty folder may be replaced. If something else was put
            there meanwhile, it stays, and the result gets another name beside it.

    Raises:
        IsADirectoryError: a file would replace a folder, and all that is in it.
        InputError: with `new`, the result got another name.
        OSError: there is no room (`NO_ROOM`) for what the block or this writes; it names `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # a part of the name: the whole may be as long as a file system allows
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name[:SHOWN]}.", dir=path.parent))
    target, aside = scratch / path.name, scratch / "replaced"
    try:
        yield target
        _sync(target)
        if new:
            _create(target, path, new)
            return
        if path.is_dir() and not target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        try:
            if path.is_dir():
                path.rename(aside)
            target.replace(path)
        except BaseException:
            if os.path.lexists(aside) and not os.path.lexists(path):
                aside.rename(path)
            raise
        _sync_entry(path.parent)
    except OSError as error:
        number = error.errno or (errno.ENOSPC if CUT_SHORT.search(str(error)) else 0)
        if number not in NO_ROOM:
            raise
        # the temporary name tells the user nothing, and most of these errors name no file
        raise OSError(number, os.strerror(number), str(path)) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _create(target: Path, path: Path, field: str) -> None:
    """Give `target` the name `path`, or another one if something but an empty folder has that."""
    try:
        if target.is_dir():
            target.rename(path)
        else:
            # a rename would replace a file
            os.link(target, path)
    except OSError:
        if not os.path.lexists(path):
            # a file system without links
            target.rename(path)
            return
        names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(2))
        other = next(name for name in names if not os.path.lexists(name))
        target.rename(other)
        raise InputError(field, f"something else was put there meanwhile; the result is in {other}", path) from None
    finally:
        _sync_entry(path.parent)


def write_json(path: Path, content: Any, *, new: str = "") -> None:
    """Write `content` as indented JSON with a final newline, atomically; see `replacing`."""
    with replacing(path, new=new) as target:
        target.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def hashed_files(folder: Path) -> list[Path]:
    """The files of a folder that its hash covers, sorted.

    Hidden files do not count, such as those that macOS leaves in each folder that it has shown.
    """
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name[0] != ".")


def content_hash(path: Path) -> str:
    """sha256 (hex) of a file, or of a folder's relative file names and contents, of `hashed_files`."""
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else hashed_files(path):
        if path.is_dir():
            digest.update(f"{file.relative_to(path).as_posix()}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


@contextmanager
def shared_lock(file: Path) -> Iterator[None]:
    """Wait for the process that holds a lock file, where nothing can be written, and keep it from locking within.

    Args:
        file: if it does not exist, nobody holds it.
    """
    import fcntl

    try:
        handle = os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    """Write a file, or all that is in a folder, to the disk."""
    if path.is_file():
        _sync_entry(path)
        return
    # file systems write what is asked for at once in one go
    found = _entries(path)
    with ThreadPoolExecutor(SYNCED) as pool:
        while some := list(itertools.islice(found, QUEUED)):
            for _ in pool.map(_sync_entry, some):
                pass


def _entries(folder: str | Path) -> Iterator[str | Path]:
    """A folder and all files and folders in it, of which few are in memory. Links to folders are not followed."""
    yield folder
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(entry.path)
            elif entry.is_file() or entry.is_dir():
                yield entry.path


def _sync_entry(path: str | Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
