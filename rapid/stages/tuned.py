"""Private choice of settings: a random number of candidates is trained, and only the best model is released.

What the trials leave on the way lies in `checkpoints/trials/`, readable by its owner alone: the number of trials, the
current trial and the best one so far. A trial that is not the best is deleted at once, and the folder at the end. What
is in it is not covered by the charge, and must not be passed on.
"""

from __future__ import annotations

import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from rapid.bundle import Bundle, is_finished, write_bundle
from rapid.bundle.format import CARD
from rapid.config.sections import MethodSettings
from rapid.data.private import PrivateImages
from rapid.dp.access import PrivateAccess
from rapid.dp.entry import Limit, Spent
from rapid.dp.ledger import Ledger, default_path
from rapid.dp.selection import SCORE, TUNE, Selection, calibrate_selection, score_spec
from rapid.dp.spending import Charge
from rapid.dp.statement import selection_statement
from rapid.dp.trials import Trials
from rapid.errors import InputError, PrivacyRefused, Stopped
from rapid.files import content_hash, write_json
from rapid.mapped import scratch_in
from rapid.progress import hidden
from rapid.rounding import as_typed
from rapid.stages.given import checked_components, described
from rapid.stages.private import Prepared, write_model
from rapid.stages.private_set import Json, PrivateSet, check_request
from rapid.stages.setup import Setup, check_releases
from rapid.stopping import check_stop
from rapid.training import RunFolder

Labeller = Callable[[Tensor], Tensor]
"""Images, uint8 (n, H, W) or (n, H, W, 3) -> scores of the classes, float (n, classes), on the CPU."""


@dataclass(frozen=True)
class Scoring:
    """How trials are compared: by the number of private images that get their label.

    Attributes:
        labeller: (finished private bundle, device) -> what labels images; it sees nothing private but the bundle.
        share: of a trial's epsilon that the noisy count would spend by itself, in (0, 1).
        words: what else decides about the score; ready for JSON.

    Raises:
        InputError: the share is out of range.
    """

    labeller: Callable[[Path, torch.device], Labeller]
    share: float
    words: Json

    def __post_init__(self) -> None:
        # before the images are read, whatever their number
        score_spec(1, self.share)


@dataclass(frozen=True)
class _Plan:
    """Inputs that were read and checked before anything is written."""

    runs: Mapping[str, Prepared]
    selection: Selection
    private: PrivateSet
    asked: Json


def tune_private_bundle(  # noqa: PLR0913 - each is an argument of the command
    base: Path | None,
    private: PrivateImages,
    out: Path,
    candidates: Mapping[str, MethodSettings],
    scoring: Scoring,
    *,
    epsilon: float,
    delta: float | None,
    trials: Trials,
    device: torch.device,
    resume: bool,
    ledger: Path | None = None,
    planned: Callable[[Selection], None] = lambda selection: None,
) -> Bundle:
    """Train models with settings drawn at random, and keep the best: all together is (epsilon, delta)-DP.

    Formal guarantee: `rapid.dp.selection`. The result is the best trial's model, its settings and its score; the number
    of trials and everything of the others is deleted. No progress is shown, which would tell the number.

    Args:
        base: public bundle; None for a run without one.
        private: the image set, with labels.
        out: new folder, or with `resume` the folder of an earlier run with the same arguments.
        candidates: settings by name, of one method and one form of images.
        scoring: how trials are compared.
        epsilon: budget of everything together, > 0.
        delta: in (0, 1), default 1 / (N ln N).
        trials: distribution of their number.
        device: where to train.
        resume: continue the run in `out` if it stopped in order, and is not in a copy of its folder or on another disk;
            else begin anew, warn of it, and charge it again.
        ledger: file in which the run is charged; default: `ledger.default_path`.
        planned: called with the budgets, before anything is spent.

    Returns:
        The finished private bundle.

    Raises:
        InputError: bad images or arguments, or an `out` that holds something else.
        PrivacyRefused: the limit of the images would be exceeded, or a trial was refused.
        Stopped: a stop was requested; the state is saved, and everything stays charged.
    """
    check_request(private, out, epsilon, delta, resume=resume)
    book = Ledger(ledger or default_path())
    setups = {}
    for name, settings in candidates.items():
        with _blamed(name):
            setups[name] = Setup.open(base, settings, device)
    with scratch_in(out):
        plan = _prepare(setups, private, out, scoring, epsilon, delta, trials, book)
    planned(plan.selection)
    record = plan.asked | {"selection": plan.selection.model_dump(mode="json")}
    with scratch_in(out), RunFolder.enter(out, TUNE, record, resume=resume) as run_folder:
        charge = plan.private.charge(book, run_folder, Limit(plan.selection.epsilon, plan.selection.delta))
        folder = _TrialsFolder(out / "checkpoints" / "trials")
        if not is_finished(out):
            _run(run_folder, folder, plan, scoring, device, charge)
        folder.remove()
        run_folder.leave()
        return Bundle.open(out, "out", "private")


def _run(
    run_folder: RunFolder, folder: _TrialsFolder, plan: _Plan, scoring: Scoring, device: torch.device, charge: Charge
) -> None:
    """Charge everything, take all trials, and release the best."""
    selection = plan.selection
    try:
        attempt = charge.begin_whole(Spent.of(TUNE, selection.event), folder.digest())
    except PrivacyRefused:
        run_folder.discard()
        raise
    if not attempt.goes_on:
        lost = "the earlier attempt was refused or did not stop in order"
        moved = "--out was copied or moved to another disk, which makes it another run"
        if attempt.number > 1 or charge.earlier:
            why = lost if attempt.number > 1 else moved
            warnings.warn(f"{why}: all trials begin and are charged anew", stacklevel=2)
        folder.begin(selection.trials.draw())
    try:
        # a warning may tell which candidates were drawn
        with hidden(), warnings.catch_warnings(action="ignore"):
            while folder.state.done < folder.state.trials:
                check_stop()
                _take_trial(folder, plan, scoring, device)
    except Stopped:
        attempt.settle(folder.digest())
        raise
    except PrivacyRefused as refused:
        # a refusal counts as the best of all results: it is what is released
        folder.remove()
        attempt.settle("")
        raise PrivacyRefused(
            f"a trial was refused, so nothing is released; the charge for all trials stays (epsilon "
            f"{as_typed(selection.epsilon)}). Of the trial alone: {refused}"
        ) from None
    # from here on the best trial may be seen, so the ledger knows that it is over
    attempt.settle(folder.digest())
    _release(run_folder.out, folder)


def _take_trial(folder: _TrialsFolder, plan: _Plan, scoring: Scoring, device: torch.device) -> None:
    """Draw a candidate, train and score it; keep it if it is the best so far. A stopped trial goes on."""
    # networks begin as torch's generator has it: if it went on from the trial before, or from the process's fixed seed,
    # the weights that are released would tell whether theirs was the first trial
    torch.seed()
    name = folder.current(list(plan.runs))
    run, out = plan.runs[name], folder.trial
    access = PrivateAccess(run.private.images, run.private.facts, run.budget, RunFolder(out), device=device)
    if not is_finished(out):
        made = run.setup.method.train_private(access, run.setup.base, run.setup.settings)
        components = checked_components(run.setup.method.name, made, access)
        write_model(out, run, run.budget, components, selection_statement(plan.selection, name))
    scores = access.map(scoring.labeller(out, device), access.images, decides=True)

    def wrong(rows: Tensor, labels: Tensor) -> Tensor:
        return (rows.argmax(1) != labels).long()

    # the only bin is that of right labels
    folder.keep_the_best(int(access.histogram(SCORE, 1, wrong, scores, access.labels)[0]))


def _release(out: Path, folder: _TrialsFolder) -> None:
    """Write the best trial's bundle to `out`."""
    best, now = Bundle.open(folder.best, "out", "private"), datetime.now(UTC)
    assert best.privacy is not None
    # times of files, and of their creation, would tell which trial it was; older ones are those of the base
    own = [path for path in folder.best.rglob("*") if path.stat().st_mtime >= folder.begun]
    for path in own:
        if path.is_file():
            shutil.copyfile(path, folder.aside).replace(path)
    for path in own:
        os.utime(path, (now.timestamp(), now.timestamp()))
    statement = best.privacy | {"created": now.isoformat(timespec="seconds")}
    statement["selection"] = statement["selection"] | {"score": folder.state.score}
    components = {name: best.stored(name) for name in best.config.components}
    card = (best.path / CARD).read_text(encoding="utf-8").replace(best.privacy["created"], statement["created"])
    write_bundle(out, best.config, components, card=card, privacy=statement)


def _prepare(
    setups: Mapping[str, Setup],
    images: PrivateImages,
    out: Path,
    scoring: Scoring,
    epsilon: float,
    delta: float | None,
    trials: Trials,
    ledger: Ledger,
) -> _Plan:
    """Read and check everything before anything is written."""
    if not setups:
        raise InputError("candidates", "there are none; give at least one")
    candidates = {name: setup.settings for name, setup in setups.items()}
    if len({(one.method, one.image) for one in candidates.values()}) > 1:
        raise InputError("candidates", "differ in their method or in image.*, which all must share")
    group_size = max(one.private.group_size for one in candidates.values())
    if group_size > 1:
        problem = "is not known for a private choice; leave it at 1, or make people the units"
        raise InputError("private.group_size", problem, group_size)
    first = next(iter(setups.values()))
    private = PrivateSet.read(images, first.settings, first.base, ledger)
    facts = private.facts
    if private.images.labels is None:
        raise InputError("private", "has no labels, by which trials are compared; use one sub-folder per class")
    asked: Json = {
        "candidates": {name: one.model_dump(mode="json") for name, one in candidates.items()},
        "trials": trials.model_dump(mode="json"),
        "score": scoring.words | {"share": scoring.share},
    } | private.request(first.base, epsilon, delta)
    score = score_spec(facts.dataset_size, scoring.share)
    specs = {}
    for name, setup in setups.items():
        with _blamed(name):
            specs[name] = [*setup.releases(facts), score]
    selection = _earlier_selection(out, asked)
    if selection is None:
        selection = calibrate_selection(specs, epsilon=epsilon, delta=asked["delta"], trials=trials, unit=facts.unit)
        private.warn([one.budget for one in selection.candidates])
    for one in selection.candidates:
        check_releases(one.budget, specs[one.name], out)
    runs = {one.name: Prepared(setups[one.name], private, one.budget, asked) for one in selection.candidates}
    for run in runs.values():
        # once before anything is spent, as in `rapid.stages.private`
        described(run.setup.method, run.setup.settings, run.setup.base, run.budget)
    return _Plan(runs, selection, private, asked)


@contextmanager
def _blamed(candidate: str) -> Iterator[None]:
    """Errors about settings name the candidate that has them: they may be those of the base, which nobody gave."""
    try:
        yield
    except InputError as error:
        if "." not in error.field:
            raise
        raise InputError("candidates", f"'{candidate}': {error}") from None


def _earlier_selection(out: Path, asked: Json) -> Selection | None:
    """The budgets of an earlier run in the same folder, if that run had the same request."""
    earlier = RunFolder(out).earlier_with(asked)
    if earlier is None:
        return None
    return Selection.from_record(earlier.get("selection", {}), asked["epsilon"], asked["delta"])


class _State(BaseModel):
    """Content of `choices.json`. Never to be released."""

    trials: int
    nonce: str = Field(default_factory=lambda: secrets.token_hex(32))
    """The ledger has a hash of this file, from which nobody can find the number of trials by trying."""
    done: int = 0
    candidate: str | None = None
    """Of the current trial."""
    score: int | None = None
    """Of the best trial."""


class _TrialsFolder:
    """The private state of a tune: see the module."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path / "choices.json"
        self.trial, self.best = path / "trial", path / "best"
        # not in the folder, whose hash the ledger has
        self.aside = path.with_name("copy")

    def begin(self, trials: int) -> None:
        """Remove what is left of an earlier attempt, and begin anew."""
        self.remove()
        self._path.mkdir(mode=0o700, parents=True)
        self._write(_State(trials=trials))

    @property
    def state(self) -> _State:
        """What was drawn and done so far."""
        return _State.model_validate_json(self._file.read_bytes())

    @property
    def begun(self) -> float:
        """When the first trial began, in seconds since the epoch."""
        return (self._path.parent / "manifest.json").stat().st_mtime

    def digest(self) -> str:
        """Hash of everything in it; empty if there is nothing."""
        return content_hash(self._path) if self._file.is_file() else ""

    def current(self, names: Sequence[str]) -> str:
        """The candidate of the current trial; a new trial draws one."""
        state = self.state
        if state.candidate is None:
            state.candidate = secrets.choice(names)
            self._write(state)
        return state.candidate

    def keep_the_best(self, score: int) -> None:
        """End the current trial: it replaces the best one if its score is higher, and is removed otherwise."""
        state = self.state
        if state.score is None or score > state.score:
            shutil.rmtree(self.trial / "checkpoints")
            shutil.rmtree(self.best, ignore_errors=True)
            self.trial.rename(self.best)
            state.score = score
        else:
            shutil.rmtree(self.trial)
        state.candidate, state.done = None, state.done + 1
        self._write(state)

    def remove(self) -> None:
        """Remove everything."""
        if self._path.exists():
            shutil.rmtree(self._path)

    def _write(self, state: _State) -> None:
        write_json(self._file, state.model_dump(mode="json"))
