"""A ledger on a file system that is read-only: its lines are read, and nothing is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import CompletedProcess, TimeoutExpired

import pytest
from filelock import FileLock
from tests_ledgers import ASKED, gaussian

from rapid.dp.entry import Limit
from rapid.dp.ledger import Ledger
from rapid.dp.spending import Charge, set_limit

DATASET = "a" * 32
MOUNTED = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
"""Shell: a folder becomes read-only for a command, in a mount namespace that ends with it."""
UNSHARE = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount"]


def allowed(tmp_path: Path) -> bool:
    """Whether this system lets us mount in a namespace; containers may not."""
    if shutil.which("unshare") is None:
        return False
    command = [*UNSHARE, "sh", "-c", MOUNTED, str(tmp_path), "true"]
    return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A ledger of four lines."""
    if not allowed(tmp_path):
        pytest.skip("no mount namespaces here, by which a folder becomes read-only")
    ledger = Ledger(tmp_path / "book" / "ledger.jsonl")
    set_limit(ledger, DATASET, Limit(8.0, 1e-5))
    for run in ("one", "two", "three"):
        Charge(ledger, DATASET, run, ASKED).begin(gaussian(0.3))
    return ledger.path


def mounted(folder: Path, *command: object) -> list[str]:
    return [*UNSHARE, "sh", "-c", MOUNTED, str(folder), sys.executable, *map(str, command)]


def rapid(written: Path, *arguments: object) -> CompletedProcess[str]:
    command = mounted(written.parent, "-m", "rapid", *arguments, "--ledger", written)
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("lock", [True, False])
def test_it_is_shown_and_verified_and_not_written(written: Path, lock: bool) -> None:
    if not lock:
        written.with_name("ledger.jsonl.lock").unlink()
    before = {path.name: path.read_bytes() for path in written.parent.iterdir()}
    verified = rapid(written, "ledger", "verify")
    assert (verified.returncode, verified.stderr) == (0, "")
    assert verified.stdout == f"{written}: 4 lines, none altered\n"
    shown = rapid(written, "ledger", "show", DATASET)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.count("\n  run ") == 3
    refused = rapid(written, "ledger", "limit", DATASET, "--epsilon", 9, "--delta", 1e-5)
    assert refused.returncode == 2
    assert "cannot be used (Read-only file system)" in refused.stderr
    assert {path.name: path.read_bytes() for path in written.parent.iterdir()} == before


def test_what_was_altered_is_found(written: Path) -> None:
    lines = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join(lines[:-1]))
    told = rapid(written, "ledger", "verify")
    assert told.returncode == 3
    assert "1 of 4 lines are missing at the end" in told.stderr
    written.write_bytes(b"".join(lines))
    written.with_name("ledger.jsonl.key").unlink()
    told = rapid(written, "ledger", "verify")
    assert told.returncode == 3
    assert "ledger.jsonl.key is gone" in told.stderr


READER = """
import sys
from pathlib import Path
from rapid.dp.ledger import Ledger
print("begun", flush=True)
print(len(Ledger(Path(sys.argv[1]), reads=True).entries()))
"""


def test_it_waits_for_who_writes_elsewhere(written: Path) -> None:
    """As where a container has the folder read-only: a line without its head would be taken for a change."""
    command = mounted(written.parent, "-c", READER, written)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        with FileLock(f"{written}.lock"):
            assert reader.stdout.readline() == "begun\n"
            with pytest.raises(TimeoutExpired):
                reader.wait(0.5)
        assert reader.stdout.read() == "4\n"


def test_a_ledger_that_was_opened_to_be_read_takes_no_line(tmp_path: Path) -> None:
    Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(ValueError, match="opened to be read"):
        set_limit(Ledger(tmp_path / "ledger.jsonl", reads=True), DATASET, Limit(1.0, 1e-5))
    assert not (tmp_path / "ledger.jsonl").exists()
