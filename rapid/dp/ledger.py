"""The ledger: an append-only file that records the spending of each private data set.

A line is a JSON object. Its `mac` is a keyed hash of the line and the previous line's `mac`, so no line can be changed,
removed or inserted without the key, which is stored beside the ledger and readable by its owner only. `FILE.head` holds
the keyed hash of the last line and the number of lines, so truncation is detected, too. Removing all of these files, or
restoring older copies of them, is not detected.

A data set is identified by a keyed hash of its images, regardless of their order and labels; the hash reveals nothing
without the key. A set with one image more or less is another data set.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from pydantic import ValidationError

from rapid.data.units import people_digests
from rapid.dp.entry import Entry, Kind, Limit, Saved, Spent
from rapid.errors import InputError, PrivacyRefused
from rapid.files import replacing, shared_lock

KEY_BYTES = 32
START = "0" * 64
"""The previous `mac` of the first line."""
ENVIRONMENT = "RAPID_LEDGER"


class TamperedLedger(PrivacyRefused):
    """The ledger was altered; nothing more may be spent on its basis."""


class Ledger:
    """A ledger file, created with its key if it does not exist.

    Args:
        path: the file; `PATH.key`, `PATH.head` and `PATH.lock` are stored beside it.
        reads: only its lines are read, so that its folder need not be writable.

    Raises:
        InputError: the folder cannot be written, or with `reads` a file cannot be read.
        TamperedLedger: there are lines, but their key is missing.
    """

    def __init__(self, path: Path, *, reads: bool = False) -> None:
        self._reads = reads
        # what a link leads to: its other files lie there, too
        self.path = path = Path(os.path.realpath(path))
        self._head = _head_of(path)
        self._checked: tuple[bytes, list[Entry]] = (b"", [])
        if path.is_dir():
            raise InputError("ledger", "is a folder; give a file in it", path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._key = self._read_key(path.with_name(path.name + ".key"))
                if not self._head.exists() and not path.exists():
                    self._write_head(0, START)
        except OSError as error:
            problem = f"cannot be used ({error.strerror}); give another file, or set {ENVIRONMENT}"
            raise InputError("ledger", problem, path) from None

    def account(self, digests: NDArray[np.uint8]) -> str:
        """The identifier of a data set: 32 hexadecimal digits.

        Args:
            digests: of the images as they are stored, before they are fitted to a model, uint8 (N, 32), so that all
                runs on them are of one account (`rapid.data.stored.image_digests`); their order does not matter.
        """
        return self._identifier(b"dataset", sorted(map(bytes, digests)))

    def assignment(self, digests: NDArray[np.uint8], units: NDArray[np.int64]) -> str:
        """A keyed hash of whose image each is: 32 hexadecimal digits. Order of images and names do not matter.

        Args:
            digests: as for `account`.
            units: number of the person that each image shows, int64 (N,).
        """
        return self._identifier(b"units", people_digests(digests, units))

    def labelling(
        self, digests: NDArray[np.uint8], labels: NDArray[np.int64], units: NDArray[np.int64] | None = None
    ) -> str:
        """A keyed hash of the label of each image: 32 hexadecimal digits. Order of images and names of people do not
        matter.

        Without the key it tells no label, only whether runs of one ledger on the same images had the same ones. Who has
        the key and the images can check a guess of all labels at once, and so find one label if they know all others.

        Args:
            digests: as for `account`.
            labels: of each image, int64 (N,).
            units: as for `assignment`; None if images are the units.
        """
        pairs = np.hstack([digests, labels.astype(">i8").reshape(-1, 1).view(np.uint8)])
        if units is not None:
            return self._identifier(b"labelled people", people_digests(pairs, units))
        return self._identifier(b"labels", sorted(map(bytes, pairs)))

    def entries(self) -> list[Entry]:
        """All lines, checked.

        Raises:
            TamperedLedger: a line was changed, inserted, removed or truncated; the message names it.
        """
        with self._locked():
            return self._read()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Lock the ledger, so that every other process waits, and yield its lines for reading and appending.

        Raises:
            TamperedLedger: see `entries`.
            ValueError: it was opened to be read.
        """
        if self._reads:
            raise ValueError("the ledger was opened to be read")
        with self._locked():
            yield Transaction(self, self._read())

    def _identifier(self, what: bytes, parts: Iterable[bytes]) -> str:
        return hmac.new(self._key, what + b"".join(parts), hashlib.sha256).hexdigest()[:32]

    def _append(
        self,
        entries: list[Entry],
        kind: Kind,
        dataset: str,
        run: str,
        limit: Limit,
        releases: list[Spent],
        more: dict[str, Any],
    ) -> Entry:
        content: dict[str, Any] = {
            "number": len(entries),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "kind": kind,
            "dataset": dataset,
            "run": run,
            "epsilon": float(limit.epsilon),
            "delta": float(limit.delta),
            "releases": [list(release) for release in releases],
            **more,
        }
        mac = self._mac(entries[-1].mac if entries else START, content)
        line = json.dumps(content | {"mac": mac}).encode() + b"\n"
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            # a crash may leave an incomplete last line; nothing was done on its basis
            os.ftruncate(handle, self._complete_bytes())
            if os.write(handle, line) < len(line):
                # as at a limit of file sizes; what was written is an incomplete line, too
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            os.fsync(handle)
        finally:
            os.close(handle)
        self._write_head(len(entries) + 1, mac)
        return Entry.model_validate_json(line)

    def _read(self) -> list[Entry]:
        content = self.path.read_bytes()[: self._complete_bytes()] if self.path.exists() else b""
        # the same bytes were checked before by this object: a long ledger is parsed once
        same, entries = self._checked if content.startswith(self._checked[0]) else (b"", [])
        entries = list(entries)
        previous = entries[-1].mac if entries else START
        for number, line in enumerate(content[len(same) :].splitlines(), len(entries)):
            try:
                entry = Entry.model_validate_json(line)
                written: dict[str, Any] = json.loads(line)
                mac = written.pop("mac")
            except (ValidationError, ValueError, KeyError):
                raise self._tampered(f"line {number + 1} cannot be read") from None
            if entry.number != number or not hmac.compare_digest(mac, self._mac(previous, written)):
                raise self._tampered(f"line {number + 1} is not the one that was written")
            entries.append(entry)
            previous = mac
        self._check_head(entries)
        self._checked = (content, list(entries))
        return entries

    def _check_head(self, entries: list[Entry]) -> None:
        """Check the head. It may be one line behind, after a crash between writing a line and its head."""
        if not self._head.exists():
            raise self._tampered(f"{self._head.name} is gone")
        number, _, rest = self._head.read_bytes().decode("ascii", "replace").partition(" ")
        mac, _, signature = rest.strip().partition(" ")
        known = re.fullmatch("[0-9]{1,18}", number) is not None
        if not known or not hmac.compare_digest(signature.encode(), self._sign_head(int(number), mac).encode()):
            raise self._tampered(f"{self._head.name} is not the one that was written")
        count = int(number)
        if len(entries) < count:
            raise self._tampered(f"{count - len(entries)} of {count} lines are missing at the end")
        if len(entries) > count + 1 or (entries[count - 1].mac if count else START) != mac:
            raise self._tampered(f"{self._head.name} belongs to other lines")

    def _write_head(self, count: int, mac: str) -> None:
        with replacing(self._head) as target:
            target.write_text(f"{count} {mac} {self._sign_head(count, mac)}\n")

    def _sign_head(self, count: int, mac: str) -> str:
        return hmac.new(self._key, f"head {count} {mac}".encode(), hashlib.sha256).hexdigest()

    def _mac(self, previous: str, content: dict[str, Any]) -> str:
        message = f"line {previous} {json.dumps(content, sort_keys=True)}"
        return hmac.new(self._key, message.encode(), hashlib.sha256).hexdigest()

    def _complete_bytes(self) -> int:
        """Length of the file up to the end of its last complete line."""
        return self.path.read_bytes().rfind(b"\n") + 1 if self.path.exists() else 0

    def _read_key(self, path: Path) -> bytes:
        if not path.exists():
            if self.path.exists() or self._head.exists():
                raise self._tampered(f"{path.name} is gone, without which its lines cannot be checked")
            with replacing(path) as target:
                target.touch(0o600)
                target.write_bytes(os.urandom(KEY_BYTES))
        key = path.read_bytes()
        if len(key) != KEY_BYTES:
            raise self._tampered(f"{path.name} is damaged")
        return key

    def _tampered(self, how: str) -> TamperedLedger:
        return TamperedLedger(
            f"the ledger {self.path} was altered: {how}; restore it from a copy, or find out what else was spent"
        )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock out other processes; the system releases the lock when the process ends, however it ends."""
        file = self.path.with_name(self.path.name + ".lock")
        # also False for root on a file system that is read-only
        if self._reads and not os.access(file.parent, os.W_OK):
            with shared_lock(file):
                yield
            return
        if not os.path.lexists(file):
            # where no file can be made, as in /proc, FileLock would try for ever
            os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
        with FileLock(file, mode=0o600):
            yield


class Transaction:
    """The lines of a locked ledger, to which more can be added."""

    def __init__(self, ledger: Ledger, entries: list[Entry]) -> None:
        self._ledger = ledger
        self.entries = entries

    def set_limit(self, dataset: str, limit: Limit, order: int) -> None:
        """Add a line that sets a limit; see `Entry`."""
        self._add("limit", dataset, "", limit, [], {"order": order})

    def charge(
        self,
        kind: Literal["reserve", "spend", "settle"],
        dataset: str,
        run: str,
        asked: Limit,
        releases: list[Spent],
        *,
        attempt: int,
        checkpoints: Iterable[Saved],
        continues: Sequence[str] = (),
        unit: str = "",
    ) -> None:
        """Add a line that charges an attempt; see `Entry`."""
        places = [list(checkpoint) for checkpoint in checkpoints]
        more: dict[str, Any] = {"attempt": attempt, "checkpoints": places}
        # versions that do not know the field can read a ledger without it
        more |= ({"continues": list(continues)} if continues else {}) | ({"unit": unit} if unit else {})
        self._add(kind, dataset, run, asked, releases, more)

    def _add(
        self, kind: Kind, dataset: str, run: str, limit: Limit, releases: list[Spent], more: dict[str, Any]
    ) -> None:
        self.entries.append(self._ledger._append(self.entries, kind, dataset, run, limit, releases, more))


def ledger_exists(path: Path) -> bool:
    """Whether there is a ledger: also one whose lines were removed, which is told when they are read."""
    return path.exists() or _head_of(Path(os.path.realpath(path))).exists()


def default_path() -> Path:
    """$RAPID_LEDGER, or `rapid/ledger.jsonl` in the user's data folder (XDG_DATA_HOME, ~/.local/share)."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen)
    home = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(home) / "rapid" / "ledger.jsonl"


def _head_of(path: Path) -> Path:
    return path.with_name(path.name + ".head")
