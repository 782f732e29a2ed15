"""What is charged when files of a run are removed, put back, exchanged or forged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import DpEvent
from tests_attempts import BUDGET, DATA, SELDOM, SIZE, STEPS, Run, refuse

from rapid.dp import PrivateAccess, QuerySpec, Release
from rapid.dp.accounting import prv_epsilon
from rapid.dp.attempts import counted, steps_of
from rapid.dp.entry import Limit, Saved
from rapid.dp.filter import RenyiFilter
from rapid.dp.spending import Charge, balance, set_limit
from rapid.dp.statement import RETAKEN_NOTE, privacy_statement
from rapid.errors import InputError, PrivacyRefused
from rapid.files import content_hash
from rapid.release.accounts import Recomputed, Statement
from rapid.training import RunFolder, Trainer

SMALL = Release(spec=QuerySpec(name="small", kind="count", dataset_size=SIZE), noise_multiplier=1000.0)


def test_a_charge_does_not_fall_when_a_checkpoint_is_removed(run: Run) -> None:
    run.until(5)
    first = balance(run.ledger.entries(), DATA).epsilon
    run.checkpoint().unlink()
    run.until(1)
    assert run.charged() == {"many": 1, "network": 6}
    assert balance(run.ledger.entries(), DATA).epsilon > first


def test_a_count_that_is_drawn_again_is_charged_again(run: Run) -> None:
    """Of a refusal that tells the count, whose record is removed each time."""
    for number in (1, 2, 3):
        counted_only(run)
        run.checkpoint("many").unlink()
        assert run.charged() == {"many": number}


@pytest.mark.parametrize("gone", ["", "many", "network"])
@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_statement_tells_what_was_taken_again(run: Run, gone: str, moves: int) -> None:
    """Also in a folder from which this one was moved to another disk."""
    run.until(4)
    if gone:
        run.checkpoint(gone).unlink()
    for number in range(moves):
        moved(run, f"moved-{number}")
        run.until(5 + number)
    run.go()
    entries = run.ledger.entries()
    with RunFolder.enter(run.out, "train-private", {}, resume=True) as folder:
        names = folder.earlier_names()
    assert len(names) == moves
    charge = Charge(run.ledger, DATA, entries[-1].run, Limit(BUDGET.epsilon, BUDGET.delta), names)
    retaken = charge.retaken(BUDGET.releases)
    assert bool(retaken) == bool(gone)
    plan = privacy_statement(BUDGET, method="rapid", noise_source="chacha20")
    stated = privacy_statement(BUDGET, method="rapid", noise_source="chacha20", retaken=retaken)
    assert stated["epsilon"] == pytest.approx(balance(entries, DATA).epsilon, rel=1e-4)
    assert (stated["epsilon"] > plan["epsilon"]) == bool(gone)
    assert (RETAKEN_NOTE in stated.get("notes", [])) == bool(gone)
    # as the gate of a release checks them
    found = Recomputed.of(Statement.model_validate(stated))
    assert found.consistent
    assert found.prv <= stated["epsilon"]


@pytest.mark.parametrize("moves", [False, True])
def test_a_count_of_another_run_is_refused(run: Run, tmp_path: Path, moves: bool) -> None:
    run.until(2)
    own = shutil.copyfile(run.checkpoint("many"), tmp_path / "own.pt")
    other = Run(tmp_path / "other")
    other.until(2)
    shutil.copyfile(other.checkpoint("many"), run.checkpoint("many"))
    if moves:
        moved(run, "moved")
    with pytest.raises(InputError, match=r"out: holds another checkpoints/many\.pt than this run saved by its ledger"):
        run.go()
    assert run.charged() == {"many": 1, "network": 2}
    shutil.copyfile(own, run.checkpoint("many"))
    run.go()


def counted_only(run: Run) -> None:
    """An attempt that ends before its training."""
    with pytest.raises(PrivacyRefused, match="overlap"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "load_state_dict", refuse)
        run.go()


def test_a_training_of_another_run_is_refused(run: Run, tmp_path: Path) -> None:
    """Also where a lost count makes the statement tell what this run took, which would be less than the model has."""
    other = Run(tmp_path / "other")
    other.ledger = run.ledger
    other.go()
    other.until(STEPS - 1)
    counted_only(run)
    shutil.copyfile(other.checkpoint(), run.checkpoint())
    for gone in (False, True):
        if gone:
            run.checkpoint("many").unlink()
        with pytest.raises(InputError, match=r"out: holds another checkpoints/network\.pt than this run saved"):
            run.go()
    # in a ledger of before, such a run may have gone on: nothing counts for less than was planned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Charge, "_check_checkpoints", lambda *_: None)
        run.go()
    name = run.ledger.entries()[-1].run
    retaken = Charge(run.ledger, DATA, name, Limit(BUDGET.epsilon, BUDGET.delta)).retaken(BUDGET.releases)
    assert steps_of(retaken) == {("many", 5.0, 1.0): 2, ("network", 3.0, 5 / SIZE): STEPS}


@pytest.mark.parametrize("name", ["many", "network"])
def test_a_result_is_in_the_ledger_as_soon_as_it_is_used(run: Run, name: str) -> None:
    """So a run that was killed, and whose result was removed, tells that it took it again."""
    if name == "many":
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "load_state_dict", interrupt)
            run.go()
    else:
        run.until(2, error=KeyboardInterrupt())
    run.checkpoint(name).unlink()
    run.go()
    own = run.ledger.entries()[-1].run
    retaken = Charge(run.ledger, DATA, own, Limit(BUDGET.epsilon, BUDGET.delta)).retaken(BUDGET.releases)
    assert steps_of(retaken) == steps_of(
        line for entry in counted(run.ledger.entries(), DATA) for line in entry.releases
    )
    assert (
        sum(steps for (release, *_), steps in steps_of(retaken).items() if release == name)
        > BUDGET.release(name).spec.steps
    )


def test_the_last_checkpoint_is_in_the_ledger_before_a_model_is_made_of_it(run: Run, tmp_path: Path) -> None:
    """So a run that was killed as it wrote its model, and goes on from an older one, tells what it took again."""
    old = tmp_path / "old.pt"

    def keep(step: int) -> None:
        if step == 2:
            shutil.copyfile(run.checkpoint(), old)

    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "use_average", interrupt)
        run.go(keep, execution=SELDOM)
    shutil.copyfile(old, run.checkpoint())
    run.go()
    assert run.charged() == {"many": 1, "network": 2 * STEPS - 1}
    own = run.ledger.entries()[-1].run
    retaken = Charge(run.ledger, DATA, own, Limit(BUDGET.epsilon, BUDGET.delta)).retaken(BUDGET.releases)
    assert steps_of(retaken) == {("many", 5.0, 1.0): 1, ("network", 3.0, 5 / SIZE): 2 * STEPS - 1}


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_without_its_name_a_run_does_not_go_on(run: Run) -> None:
    """It would be another one, whose statement tells nothing of what its training states come from."""
    run.until(2)
    (run.out / "checkpoints" / "run.json").unlink()
    with pytest.raises(InputError, match=r"run\.json that can be read; restore it, or give a new folder"):
        run.go()
    assert run.charged() == {"many": 1, "network": 2}


def test_a_crashed_run_whose_folder_was_renamed_is_the_same(run: Run) -> None:
    """What it reserved is not charged beside what it takes."""
    run.until(3, error=KeyboardInterrupt())
    run.out = run.out.rename(run.out.with_name("renamed"))
    run.go()
    assert {entry.run for entry in run.ledger.entries()} == {run.ledger.entries()[0].run}
    assert run.charged() == {"many": 1, "network": 4 + 3}


def test_an_older_checkpoint_that_is_put_back_is_charged_from_its_step(run: Run, tmp_path: Path) -> None:
    run.until(2)
    older = shutil.copyfile(run.checkpoint(), tmp_path / "older.pt")
    run.until(4)
    shutil.copyfile(older, run.checkpoint())
    run.go()
    assert run.charged() == {"many": 1, "network": 2 + 2 + (STEPS - 2)}
    reserved = [entry for entry in run.ledger.entries() if entry.kind == "reserve"]
    # the lines name what each attempt went on from
    assert [entry.attempt for entry in reserved] == [1, 2, 3]
    assert [{(s.name, s.step) for s in entry.checkpoints} for entry in reserved] == [
        set(), {("many", 1), ("network", 2)}, {("many", 1), ("network", 2)},
    ]  # fmt: skip
    assert Saved("network", 2, content_hash(older)) in reserved[2].checkpoints


def test_a_snapshot_of_the_whole_folder_is_charged_as_what_it_is(run: Run, tmp_path: Path) -> None:
    """Put back in its place or elsewhere: the steps behind its checkpoints are taken again."""
    run.until(3)
    shutil.copytree(run.out, tmp_path / "snapshot")
    run.go()
    shutil.rmtree(run.out)
    shutil.copytree(tmp_path / "snapshot", run.out)
    run.go()
    run.out = tmp_path / "snapshot"
    run.go()
    assert run.charged() == {"many": 1, "network": 3 + 3 * (STEPS - 3)}


def test_a_forged_checkpoint_is_refused_or_charged_from_its_step(run: Run) -> None:
    run.until(2)
    state = torch.load(run.checkpoint(), weights_only=True)
    torch.save(state | {"step": 5}, run.checkpoint())
    with pytest.raises(InputError, match=r"holds another checkpoints/network\.pt than this run saved"):
        run.go()
    torch.save(state | {"step": 1}, run.checkpoint())
    run.go()
    assert run.charged() == {"many": 1, "network": 2 + (STEPS - 1)}
    for step in (-3, STEPS + 1, 1.5, True):
        torch.save(state | {"step": step}, run.checkpoint())
        with pytest.raises(InputError, match="is no checkpoint of this run"):
            run.go()


def test_a_checkpoint_exchanged_after_the_charge_is_refused(run: Run) -> None:
    run.until(4)
    count = PrivateAccess.count

    def removing(*arguments: Any) -> int:
        run.checkpoint().unlink()
        return count(*arguments)

    with pytest.raises(PrivacyRefused, match="'network' was exchanged"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateAccess, "count", removing)
        run.go()
    assert run.charged() == {"many": 1, "network": 4}


def test_a_run_is_bound_to_its_images_and_their_ledger(run: Run) -> None:
    run.until(2)
    with RunFolder.enter(run.out, "train-private", {}, resume=True) as folder:
        with pytest.raises(
            InputError, match="private: differs from the images of the run in --out, or --ledger"
        ) as refused:
            folder.run_name("b" * 32)
        assert refused.value.exit_code == 2
        name = folder.run_name(DATA)
    # nor does the ledger know it, or its checkpoints, for another data set
    for run_name, places in ((name, None), ("other", named(run))):
        with pytest.raises(InputError, match="differs from the images of the run in --out; give those"):
            Charge(run.ledger, "b" * 32, run_name, Limit(4.0, 1e-3)).begin(BUDGET.releases, places)


def limited(run: Run) -> float:
    """Set a limit that the plan keeps by numerical composition alone; its epsilon."""
    epsilon = prv_epsilon(BUDGET.events(), BUDGET.delta)
    assert not RenyiFilter.of(epsilon, BUDGET.delta).admits(BUDGET.events())
    set_limit(run.ledger, DATA, Limit(epsilon, BUDGET.delta))
    return epsilon


def events_of(run: Run) -> list[DpEvent]:
    """Of everything that the ledger was charged for."""
    return [release.dp_event for line in counted(run.ledger.entries(), DATA) for release in line.releases]


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_first_run_at_its_limit_goes_on_where_it_was_moved(run: Run, moves: int) -> None:
    epsilon = limited(run)
    run.until(2)
    for number in range(moves):
        moved(run, f"moved-{number}")
        # nothing else begins meanwhile, although the filter alone has room for it
        with pytest.raises(PrivacyRefused, match="resume that run as it was planned"):
            Charge(run.ledger, DATA, "other", Limit(1.0, 1e-3)).begin([SMALL])
        run.until(3 + number)
    run.go()
    assert run.charged() == {"many": 1, "network": STEPS}
    assert prv_epsilon(events_of(run), BUDGET.delta) == pytest.approx(epsilon)
    found = balance(run.ledger.entries(), DATA)
    assert found.one_plan
    assert found.epsilon <= epsilon * (1 + 1e-6)
    with pytest.raises(PrivacyRefused):
        Charge(run.ledger, DATA, "other", Limit(1.0, 1e-3)).begin([SMALL])


@pytest.mark.parametrize("first", ["own", "copy", "both"])
def test_only_one_of_two_copies_goes_on_at_the_limit(run: Run, first: str) -> None:
    """Steps that both would take are in the plan only once."""
    epsilon = limited(run)
    run.until(2)
    copies = [Run(run.out.parent / name) for name in ("one", "two")]
    for copy in copies:
        copy.ledger = run.ledger
        shutil.copytree(run.out, copy.out)
    goes_on, *others = [run, *copies] if first == "own" else [*copies, run]
    goes_on.until(4)
    if first == "both":
        # the copy of a copy knows the names of both
        moved(goes_on, "moved")
        goes_on.until(5)
    for other in others:
        with pytest.raises(PrivacyRefused, match="is spent or reserved, and this run would raise it"):
            other.go()
        assert prv_epsilon(events_of(run), BUDGET.delta) < epsilon
    goes_on.go()
    assert run.charged() == {"many": 1, "network": STEPS}
    assert prv_epsilon(events_of(run), BUDGET.delta) == pytest.approx(epsilon)


def test_a_crashed_run_that_was_moved_stays_charged(run: Run) -> None:
    """Its lines do not tell whether it goes on where it was; at its limit it cannot go on elsewhere."""
    limited(run)
    run.until(2, error=KeyboardInterrupt())
    moved(run, "moved")
    with pytest.raises(PrivacyRefused, match="goes on as it was planned: raise the limit with rapid ledger limit"):
        run.go()
    set_limit(run.ledger, DATA, Limit(100.0, BUDGET.delta))
    run.go()
    # the crash lost the second step
    assert run.charged() == {"many": 1, "network": STEPS + STEPS - 1}


def moved(run: Run, name: str) -> None:
    """To another disk: a copy, and what it was copied from is removed."""
    there = shutil.copytree(run.out, run.out.with_name(name))
    shutil.rmtree(run.out)
    run.out = there


def named(run: Run) -> dict[str, Saved]:
    return {place.name: place for place in run.ledger.entries()[-1].checkpoints}
