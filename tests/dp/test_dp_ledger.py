"""The ledger and its rules: tampering, composition, limits, crashes, processes that spend at the same time."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests_ledgers import ASKED, DELTA, SIZE, counted, gaussian, spent

from rapid.data.stored import image_digests
from rapid.dp.accounting import prv_epsilon
from rapid.dp.entry import Limit, Saved, Spent
from rapid.dp.events import dp_sgd_event, gaussian_event
from rapid.dp.filter import RenyiFilter
from rapid.dp.ledger import Ledger, TamperedLedger
from rapid.dp.releases import DpSgdSpec, Release
from rapid.dp.spending import Charge, balances, set_limit
from rapid.errors import InputError, PrivacyRefused


def trained(noise_multiplier: float, batch: int, steps: int) -> Release:
    spec = DpSgdSpec(name="denoiser", dataset_size=SIZE, expected_batch=batch, steps=steps, clip_norm=1.0)
    return Release(spec=spec, noise_multiplier=noise_multiplier)


RELEASES = [counted(4.0, "overlap"), trained(1.0, 1, 100)]
RUN = [Spent.of("overlap", gaussian_event(4.0)), Spent.of("denoiser", dp_sgd_event(1.0, 0.01, 100))]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A ledger of five lines: a limit, and two runs that were killed at their first step."""
    ledger = Ledger(tmp_path / "book" / "ledger.jsonl")
    set_limit(ledger, "a" * 32, Limit(8.0, DELTA))
    for run in ("one", "two"):
        Charge(ledger, "a" * 32, run, ASKED).begin(RELEASES).begin("overlap", 1)
    assert len(ledger.entries()) == 5
    return ledger.path


def epsilon_of(releases: list[Spent]) -> float:
    return prv_epsilon([release.dp_event for release in releases], DELTA)


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    ledger, written = Ledger(tmp_path / "ledger.jsonl"), tmp_path / "ledger.jsonl"
    set_limit(ledger, "a" * 32, Limit(8.0, DELTA))
    Charge(ledger, "a" * 32, "one", ASKED).begin([counted(4.0)]).begin("count", 1)
    content = written.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 1
        written.write_bytes(bytes(changed))
        with pytest.raises(TamperedLedger, match="altered: "):
            Ledger(written).entries()
    written.write_bytes(content)
    assert len(Ledger(written).entries()) == 3


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda old: old[:2] + old[3:], "line 3 is not the one"),
        (lambda old: old[:-1], "1 of 5 lines are missing at the end"),
        (lambda old: [], "5 of 5 lines are missing at the end"),
        (lambda old: [old[1], old[0], *old[2:]], "line 1 is not"),
        (lambda old: [*old, old[-1]], "line 6 is not"),
        (lambda old: [*old[:-1], b"{}\n"], "line 5 cannot be read"),
        (lambda old: [*old[:-1], b"\xff\n"], "line 5 cannot be read"),
    ],
)
def test_lines_taken_out_put_in_or_moved(
    written: Path, change: Callable[[list[bytes]], list[bytes]], words: str
) -> None:
    written.write_bytes(b"".join(change(lines(written))))
    with pytest.raises(TamperedLedger, match=words) as refused:
        Ledger(written).entries()
    assert refused.value.exit_code == 3
    # and nothing is spent on its word
    with pytest.raises(TamperedLedger):
        Charge(Ledger(written), "a" * 32, "three", ASKED).begin(RELEASES)


@pytest.mark.parametrize("suffix", [".key", ".head"])
def test_what_lies_beside_it_is_needed(written: Path, suffix: str) -> None:
    beside = written.with_name(written.name + suffix)
    content = beside.read_bytes()
    for damage in (content[:-3], bytes(32), b"", b"\xff\xfe", "² a b".encode(), b"9" * 5000, b"5 a \xe9"):
        beside.write_bytes(damage)
        with pytest.raises(TamperedLedger):
            Ledger(written).entries()
    beside.unlink()
    with pytest.raises(TamperedLedger, match="is gone"):
        Ledger(written).entries()
    if suffix == ".key":
        # not even without the lines, which the head still counts
        written.unlink()
        with pytest.raises(TamperedLedger, match="is gone"):
            Ledger(written)


def test_a_ledger_may_be_reached_by_a_link(written: Path, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere" / "link"
    link.parent.mkdir()
    link.symlink_to(written)
    assert Ledger(link).entries() == Ledger(written).entries()
    assert list(link.parent.iterdir()) == [link]


def test_lines_of_another_ledger_do_not_fit(written: Path, tmp_path: Path) -> None:
    other = Ledger(tmp_path / "other" / "ledger.jsonl")
    for number in range(5):
        set_limit(other, "a" * 32, Limit(100.0 + number, DELTA))
    shutil.copyfile(other.path, written)
    with pytest.raises(TamperedLedger):
        Ledger(written).entries()


def test_a_crash_while_a_line_is_written_loses_nothing(written: Path) -> None:
    """What is left of a torn line was never acted upon; a line without its head counts."""
    head = written.with_name(written.name + ".head")
    whole = written.read_bytes()
    for part in (1, 40, len(lines(written)[-1]) - 1):
        with written.open("ab") as stream:
            stream.write(lines(written)[-1][:part])
        assert len(Ledger(written).entries()) == 5
        set_limit(Ledger(written), "b" * 32, Limit(1.0, DELTA))
        assert len(Ledger(written).entries()) == 6
        written.write_bytes(whole)
        head.unlink()
        Ledger(written)._write_head(5, json.loads(lines(written)[-1])["mac"])
    before = head.read_bytes()
    set_limit(Ledger(written), "b" * 32, Limit(1.0, DELTA))
    head.write_bytes(before)
    assert len(Ledger(written).entries()) == 6
    set_limit(Ledger(written), "b" * 32, Limit(2.0, DELTA))
    assert len(Ledger(written).entries()) == 7


def test_only_the_owner_reads_the_key(written: Path) -> None:
    for suffix in (".key", ".lock", ""):
        assert written.with_name(written.name + suffix).stat().st_mode & 0o077 == 0


@given(st.integers(0, 4), st.integers(0, 2**32 - 1))
def test_an_account_is_that_of_the_images_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, n: int, s: int
) -> None:
    draws = np.random.default_rng(s)
    images = draws.integers(0, 256, (n, 3, 5), dtype=np.uint8)
    folder = tmp_path_factory.mktemp("ledgers")
    ledger, other = Ledger(folder / "one"), Ledger(folder / "two")
    account = ledger.account(image_digests(images))
    assert account == Ledger(folder / "one").account(image_digests(draws.permutation(images)))
    assert len(account) == 32
    # it tells nothing without the key, and the same images in another shape are others
    assert account != other.account(image_digests(images))
    assert account not in hashlib.sha256(images.tobytes()).hexdigest()
    if n:
        assert account != ledger.account(image_digests(images[:-1]))
        assert account != ledger.account(image_digests(images.reshape(n, 5, 3)))
        changed = images.copy()
        changed[0, 0, 0] ^= 1
        assert account != ledger.account(image_digests(changed))


@given(st.integers(2, 6), st.integers(0, 2**32 - 1), st.booleans())
def test_labels_are_known_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, n: int, s: int, by_people: bool
) -> None:
    draws = np.random.default_rng(s)
    digests = image_digests(draws.integers(0, 256, (n, 2, 2), dtype=np.uint8))
    labels, units = draws.integers(0, 300, n), draws.integers(0, 3, n) if by_people else None
    folder = tmp_path_factory.mktemp("ledgers")
    ledger = Ledger(folder / "one")
    found = ledger.labelling(digests, labels, units)
    order = draws.permutation(n)
    renamed = None if units is None else 7 - units[order]
    assert found == Ledger(folder / "one").labelling(digests[order], labels[order], renamed)
    assert len(found) == 32
    # without the key there is nothing to compare a guess with
    assert found != Ledger(folder / "two").labelling(digests, labels, units)
    for number in range(n):
        changed = labels.copy()
        changed[number] += draws.choice([1, 256, 2**40])
        assert ledger.labelling(digests, changed, units) != found
    # a label belongs to its image
    others = np.roll(labels, 1)
    assert (ledger.labelling(digests, others, units) == found) == np.array_equal(labels, others)


def test_labels_of_equal_images_belong_to_their_people(tmp_path: Path) -> None:
    """Two people show the same image, and each has another one."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    digests = image_digests(np.array([0, 0, 1, 2], np.uint8).reshape(4, 1, 1))
    units = np.array([0, 1, 0, 1])
    found = ledger.labelling(digests, np.array([5, 6, 7, 7]), units)
    assert ledger.labelling(digests, np.array([6, 5, 7, 7]), units) != found
    assert ledger.labelling(digests, np.array([6, 5, 7, 7]), np.array([1, 0, 0, 1])) == found


def test_runs_compose_numerically(written: Path) -> None:
    together = spent(written)
    alone = epsilon_of(RUN)
    assert together.epsilon_prv == pytest.approx(epsilon_of(RUN + RUN))
    assert alone < together.epsilon_prv < 1.8 * alone
    # the limit is by the filter, which holds for any way in which the second run was chosen
    events = [release.dp_event for release in RUN + RUN]
    assert together.epsilon == together.epsilon_filter == RenyiFilter.of(8.0, DELTA).spent(events)
    assert together.epsilon_prv < together.epsilon <= 8
    assert together.limit == Limit(8.0, DELTA)
    assert [run.run for run in together.runs] == ["one", "two"]
    assert spent(written, "c" * 32).epsilon == 0
    assert [found.dataset for found in balances(Ledger(written).entries())] == ["a" * 32]


def test_a_run_beyond_the_limit_is_refused_and_not_charged(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    set_limit(ledger, "a" * 32, Limit(1.0, DELTA))
    Charge(ledger, "a" * 32, "first", ASKED).begin(gaussian(0.7))
    before = ledger.path.read_bytes()
    with pytest.raises(
        PrivacyRefused, match=r"limit of this data set is epsilon 1 at delta 1e-05; 0\.788 is spent"
    ) as refused:
        Charge(ledger, "a" * 32, "second", ASKED).begin(gaussian(0.85))
    assert "if all plans had been fixed in advance" in str(refused.value)
    assert ledger.path.read_bytes() == before
    # together, 0.7 and 0.4 are less than 1; added up they would be more
    Charge(ledger, "a" * 32, "second", ASKED).begin(gaussian(0.4))
    assert 0.7 < spent(ledger.path).epsilon <= 1
    # other data sets have accounts of their own
    Charge(ledger, "b" * 32, "third", ASKED).begin(gaussian(5.0))
    set_limit(ledger, "a" * 32, Limit(0.5, DELTA))
    with pytest.raises(PrivacyRefused):
        Charge(ledger, "a" * 32, "fourth", ASKED).begin(gaussian(0.01))


def test_the_first_run_may_spend_the_limit_and_nothing_comes_after_it(tmp_path: Path) -> None:
    """No result could influence its plan, so numerical composition holds; the filter alone would refuse it."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    set_limit(ledger, "a" * 32, Limit(1.0, DELTA))
    with pytest.raises(PrivacyRefused, match="this first run would spend 1\\.0"):
        Charge(ledger, "a" * 32, "larger", ASKED).begin(gaussian(1.01))
    first = Charge(ledger, "a" * 32, "first", ASKED).begin(gaussian(0.98))
    found = spent(ledger.path)
    assert found.epsilon_filter is not None
    assert found.epsilon == found.epsilon_prv <= 1 < found.epsilon_filter
    for run in ("first", "second"):
        with pytest.raises(PrivacyRefused):
            Charge(ledger, "a" * 32, run, ASKED).begin([*gaussian(0.98), counted(1000.0, "other")])
    # its own steps that are left belong to the plan
    first.settle()
    Charge(ledger, "a" * 32, "first", ASKED).begin(gaussian(0.98)).begin("count", 1)
    with pytest.raises(PrivacyRefused):
        Charge(ledger, "a" * 32, "first", ASKED).begin(gaussian(0.98))


def trained(sigma: float, rate: float, name: str) -> Release:
    spec = DpSgdSpec(name=name, dataset_size=1000, expected_batch=round(1000 * rate), steps=1, clip_norm=1.0)
    return Release(spec=spec, noise_multiplier=sigma)


def test_a_first_run_that_was_stopped_leaves_no_choice(tmp_path: Path) -> None:
    """Its plan fits by numerical composition alone. To begin another run or to go on with it, whichever suits the first
    result, would have 1.18 times the limit's delta."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    set_limit(ledger, "a" * 32, Limit(1.0, 1.515e-6))
    plan = [trained(5.343, 1.0, "first"), trained(0.7845, 0.01, "second")]
    attempt = Charge(ledger, "a" * 32, "one", ASKED).begin(plan)
    attempt.begin("first", 1)
    attempt.settle()
    assert spent(ledger.path).epsilon < 0.8
    # nor does the run itself with another plan
    for run in ("other", "one"):
        with pytest.raises(PrivacyRefused, match="resume that run as it was planned"):
            Charge(ledger, "a" * 32, run, ASKED).begin([trained(8.021, 1.0, "first")])
    starts = {"first": Saved("first", 1, "ab" * 32), "second": Saved("second", 0, "")}
    Charge(ledger, "a" * 32, "one", ASKED).begin(plan, starts)
    # a limit whose filter admits the whole plan and the other run leaves the choice
    set_limit(ledger, "a" * 32, Limit(20.0, 1.515e-6))
    Charge(ledger, "a" * 32, "other", ASKED).begin([trained(8.021, 1.0, "first")])


SPENDER = """
import sys
from pathlib import Path
from rapid.errors import PrivacyRefused
from rapid.dp.spending import Charge
from rapid.dp.entry import Limit
from rapid.dp.ledger import Ledger
from rapid.dp.releases import QuerySpec, Release
count = Release(spec=QuerySpec(name="count", kind="count", dataset_size=100), noise_multiplier=8.0)
ledger = Ledger(Path(sys.argv[1]))
sys.stdin.readline()
for number in range(5):
    try:
        charge = Charge(ledger, "a" * 32, f"{sys.argv[2]}-{number}", Limit(1.0, 1e-5))
        charge.begin([count])
        print("spent")
    except PrivacyRefused:
        print("refused")
"""


def test_processes_at_once_cannot_spend_more_than_there_is(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    allowed = 7
    # the least limit, to a hundredth, whose filter admits seven of them
    events = [gaussian_event(8.0)] * allowed
    limit = next(one / 100 for one in range(50, 500) if RenyiFilter.of(one / 100, DELTA).admits(events))
    set_limit(ledger, "a" * 32, Limit(limit, DELTA))
    command = [sys.executable, "-c", SPENDER, str(ledger.path)]
    spenders = [
        subprocess.Popen([*command, str(n)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for n in range(4)
    ]
    answers = []
    for spender in spenders:
        assert spender.stdin is not None
        spender.stdin.write("\n")
        spender.stdin.flush()
    for spender in spenders:
        answers += spender.communicate(timeout=120)[0].split()
    assert sorted(set(answers)) == ["refused", "spent"]
    assert answers.count("spent") == allowed
    assert len(answers) == 20
    assert len(ledger.entries()) == 1 + allowed
    assert spent(ledger.path).epsilon <= limit * (1 + 1e-6)


def test_a_line_that_does_not_fit_is_not_a_charge(written: Path) -> None:
    """At a limit of file sizes, as on a full disk, less is written than was asked for, and nobody is told."""
    script = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from rapid.dp.ledger import Ledger, Limit\n"
        "from rapid.dp.spending import set_limit\n"
        "path = Path(sys.argv[1])\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "size = path.stat().st_size + 100\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))\n"
        "set_limit(Ledger(path), 'b' * 32, Limit(1.0, 1e-5))\n"
    )
    before = Ledger(written).entries()
    process = subprocess.run(
        [sys.executable, "-c", script, str(written)], capture_output=True, text=True, timeout=120, check=False
    )
    assert "No space left on device" in process.stderr.splitlines()[-1]
    assert Ledger(written).entries() == before
    set_limit(Ledger(written), "b" * 32, Limit(1.0, 1e-5))
    assert len(Ledger(written).entries()) == len(before) + 1


def test_a_ledger_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be used") as refused:
        Ledger(tmp_path / "file" / "ledger.jsonl")
    assert (refused.value.field, refused.value.value) == ("ledger", tmp_path / "file" / "ledger.jsonl")
