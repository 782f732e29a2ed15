"""The output folder of a long command: begun once, resumed with the same manifest, never mixed with other content."""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from rapid.data.units import ONE_IMAGE, plural
from rapid.errors import InputError
from rapid.files import check_folder, write_json
from rapid.parsing import parse_json

MANIFEST, RUN, LOCK = "manifest.json", "run.json", "lock"
REMEMBERED = "remembered"
"""What a manifest tells a resumed run, which need not ask for the same."""


class RunFolder:
    """A folder in which a bundle grows; `checkpoints/` holds what is needed to resume and is not part of the bundle.

    Attributes:
        out: the folder.
        new: whether this run began it.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.new = False
        self._checkpoints = out / "checkpoints"
        self._manifest = self._checkpoints / MANIFEST
        self._made = False

    @classmethod
    @contextmanager
    def enter(
        cls,
        out: Path,
        command: str,
        manifest: dict[str, Any],
        *,
        resume: bool,
        remembered: dict[str, Any] | None = None,
    ) -> Iterator[RunFolder]:
        """Begin in a new or empty folder, or with `resume` continue in one with the same command and manifest.

        No other process can enter meanwhile. The manifest must hold public facts only: it is written to disk. If the
        block raises an `InputError` before it has written anything, the run is discarded.

        Args:
            out: the folder.
            command: name of the command.
            manifest: what the run is bound to, ready for JSON.
            resume: continue an earlier run.
            remembered: what a new run tells those that resume it (`REMEMBERED` in `earlier`); public facts, too.

        Raises:
            InputError: the folder holds something else, or another manifest, or an unfinished run without `resume`, or
                another process works in it; a manifest with other private images blames `private`.
        """
        run_folder = cls(out)
        written = {"command": command, **manifest}
        run_folder._made = not out.exists()
        run_folder.check(resume=resume)
        with run_folder._locked():
            # another process may have begun one meanwhile
            run_folder.check(resume=resume)
            if not run_folder._manifest.is_file():
                run_folder.new = True
                write_json(run_folder._manifest, written | ({REMEMBERED: remembered} if remembered else {}))
            earlier = run_folder.earlier()
            if earlier is None:
                problem = f"holds a run whose checkpoints/{MANIFEST} is damaged; restore it, or give a new folder"
                raise InputError("out", problem, out)
            earlier.pop(REMEMBERED, None)
            # the earlier manifest went through JSON, so this one must too
            asked = json.loads(json.dumps(written))
            _check_images(earlier, asked)
            difference = _first_difference(earlier, asked)
            if difference is not None:
                raise InputError(
                    "out", f"holds a run with another '{difference}'; use the same value, or give a new folder", out
                )
            run_folder._sweep()
            try:
                yield run_folder
            except InputError:
                if not run_folder._begun({MANIFEST}):
                    run_folder.discard()
                raise

    def check(self, *, resume: bool) -> None:
        """Refuse a folder that `enter` refuses whatever the manifest is, before long work. Nothing is left in it.

        Raises:
            InputError: it is a file, holds something else, or an earlier run without `resume`, or cannot be written.
        """
        if self.out.exists() and not self.out.is_dir():
            raise InputError("out", "is a file; give a new folder", self.out)
        begun = self._manifest.is_file()
        if not begun and self._begun():
            raise InputError("out", "holds other files and no run of rapid; give a new folder", self.out)
        if begun and not resume:
            raise InputError("out", "holds an earlier run; continue with --resume or give a new folder", self.out)
        check_folder(self.out, "out", self.out)

    def _begun(self, but: Set[str] = frozenset()) -> bool:
        """Whether the folder holds more than the remains of a run that was killed before it wrote its manifest.

        Args:
            but: names in `checkpoints/` that do not count.
        """
        if not self.out.exists():
            return False
        if any(path != self._checkpoints for path in self.out.iterdir()):
            return True
        inside = self._checkpoints.iterdir() if self._checkpoints.is_dir() else ()
        return any(path.name not in {LOCK, *but} and not path.name.startswith(f".{MANIFEST}.") for path in inside)

    def run_name(self, dataset: str = "", units: str = "", labels: str | None = None) -> str:
        """A random name for the run in this folder, the same when it is resumed here.

        A copy of the folder is another run: releases that both make are charged twice. `earlier_names` has the name of
        the first. A folder that was renamed, or whose disk got another number, is the same.

        Args:
            dataset: keyed identifier of the private images, which binds the folder to them and to their ledger.
            units: keyed hash of whose image each is, if people are the units; binds the folder to it.
            labels: keyed hash of the label of each image, empty if they have none; binds the folder to it, one of an
                older version from now on. None if the run does not look at labels.

        Raises:
            InputError: the run was begun with other images, with another ledger, with other people, or with other
                labels, or its name is lost beside its training states.
        """
        file, folder = self._checkpoints / RUN, _places(self.out.resolve())
        try:
            written = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            written = {}
        written = written if isinstance(written, dict) else {}
        if not written and any(self._checkpoints.glob("*.pt")):
            # under a new name its statement would tell nothing of what these come from
            raise InputError(
                "out", f"has no checkpoints/{RUN} that can be read; restore it, or give a new folder", self.out
            )
        before = dict(written)
        if dataset and written.setdefault("dataset", dataset) != dataset:
            problem = "differs from the images of the run in --out, or --ledger from its ledger"
            raise InputError("private", f"{problem}; give the same images and ledger, or a new --out")
        if "dataset" in before and written.get("units", "") != units:
            raise InputError(
                "private",
                "assigns images to other people than the run in --out did; give the same assignment, or a new --out",
            )
        if units:
            written["units"] = units
        if labels is not None and written.setdefault("labels", labels) != labels:
            problem = "has other labels than when the run in --out began; give the same labels, or a new --out"
            raise InputError("private", problem)
        name = written.get("run")
        known = written.get("folder")
        if not isinstance(name, str) or not isinstance(known, list) or not any(place in known for place in folder):
            written["run"] = secrets.token_hex(8)
            if isinstance(name, str):
                written["earlier"] = [*_earlier_names(written), name]
        written["folder"] = folder
        if written != before:
            write_json(file, written)
        return str(written["run"])

    def earlier_names(self) -> tuple[str, ...]:
        """Names of the run in folders from which this one was moved or copied; see `run_name`, which notes them."""
        return _earlier_names(json.loads((self._checkpoints / RUN).read_text(encoding="utf-8")))

    def earlier(self) -> dict[str, Any] | None:
        """The manifest of an earlier run in this folder; None if there is none that can be read."""
        try:
            manifest = parse_json(self._manifest.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return manifest if isinstance(manifest, dict) else None

    def earlier_with(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """The manifest of an earlier run in this folder if it has all that `request` has; else None."""
        earlier = self.earlier()
        # as a manifest has it: tuples are lists there
        written = json.loads(json.dumps(request))
        return None if earlier is None or earlier | written != earlier else earlier

    def checkpoint(self, name: str) -> Path:
        """File for the training state of `name`."""
        return self._checkpoints / f"{name}.pt"

    def discard(self) -> None:
        """Remove what this run wrote if it began here: nothing was done, so the command can be repeated."""
        if not self.new:
            return
        if self._made:
            shutil.rmtree(self.out)
        else:
            # the user's own empty folder
            shutil.rmtree(self._checkpoints)

    def leave(self) -> None:
        """Remove training states: the bundle is finished. The manifest stays, so a repeated command is recognised."""
        self._sweep()
        for path in self._checkpoints.iterdir():
            # folders are not ours: some systems keep thumbnails and the like in each
            if path.name not in (MANIFEST, RUN, LOCK) and not path.is_dir():
                path.unlink()

    def _sweep(self) -> None:
        """Remove half-written files of killed runs.

        A training state among them belongs to steps that are taken again, so it must not be seen beside their result.
        """
        for folder in (self.out, self._checkpoints):
            for path in folder.glob(".*.*"):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock out other processes; the system releases the lock when the process ends, however it ends."""
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._checkpoints / LOCK, timeout=0, mode=0o600)
        try:
            lock.acquire()
        except Timeout:
            raise InputError(
                "out", "is in use by another process; wait until that ends, or stop it", self.out
            ) from None
        try:
            yield
        finally:
            lock.release()


def _places(folder: Path) -> list[str]:
    """Where a folder is, by its path and by its disk. Hashes, because it may be shared, and only equality matters."""
    own = folder.stat()
    where = (f"path {folder} {own.st_ino}", f"disk {own.st_dev} {own.st_ino}")
    return [hashlib.sha256(place.encode()).hexdigest() for place in where]


def _earlier_names(written: Mapping[str, Any]) -> tuple[str, ...]:
    names = written.get("earlier")
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _check_images(earlier: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse other private images by what is public about them, before what follows from it, such as delta, differs.

    Args:
        earlier: manifest of the run in the folder.
        asked: manifest of this run.

    Raises:
        InputError: they are counted by another unit, are more or less, or have other classes.
    """
    if earlier.get("command") != asked["command"] or not {"dataset_size", "classes"} <= earlier.keys() & asked.keys():
        return
    had, have = (plural(manifest.get("unit", ONE_IMAGE)) for manifest in (earlier, asked))
    if had != have:
        problem = f"is counted in {have}, and was in {had} by the run in --out"
        fix = "give --unit-column or --unit-folders as before, or a new --out"
    elif (before := earlier["dataset_size"]) != (size := asked["dataset_size"]):
        problem, fix = f"has {size} {have}, and the run in --out had {before}", "give the same images, or a new --out"
    elif earlier["classes"] != asked["classes"]:
        problem, fix = "has other classes than the run in --out had", "declare the same --classes, or give a new --out"
    else:
        return
    raise InputError("private", f"{problem}; {fix}")


def _first_difference(first: Any, second: Any, name: str = "") -> str | None:
    if isinstance(first, dict) and isinstance(second, dict):
        # in the order of the second, so that a setting is named before values derived from it
        for key in dict.fromkeys([*second, *first]):
            inner = f"{name}.{key}" if name else key
            if (found := _first_difference(first.get(key), second.get(key), inner)) is not None:
                return found
        return None
    return None if first == second else name
