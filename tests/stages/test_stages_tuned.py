"""The private choice as a whole, with a small method: what is released, what is deleted, stops, crashes, refusals."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rapid.bundle import Bundle
from rapid.bundle.card import privacy_in_words
from rapid.data.private import PrivateImages
from rapid.data.stored import image_digests
from rapid.data.units import PeopleFrom
from rapid.dp.accounting import prv_epsilon
from rapid.dp.entry import Limit
from rapid.dp.ledger import Ledger
from rapid.dp.selection import Selection
from rapid.dp.spending import Balance, balances, set_limit
from rapid.dp.trials import Trials
from rapid.errors import InputError, PrivacyRefused, Stopped
from rapid.methods import apply_overrides
from rapid.methods.rapid.settings import RapidSettings
from rapid.stages.tuned import Labeller, Scoring, tune_private_bundle
from rapid.stopping import request_stop, stop_on_signal

TOY = Path(__file__).parents[1] / "methods" / "toy"
BOUNDS = {"low": 2.0, "middle": 4.0, "high": 8.0}
MOVED = "--out was copied or moved to another disk, which makes it another run: all trials begin and are charged anew"
CPU, EPSILON, DELTA = torch.device("cpu"), 60.0, 1e-4


@pytest.fixture(scope="module", autouse=True)
def _toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The toy method, as an installed package."""
    site = tmp_path_factory.mktemp("site")
    info = site / "class_means-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: class-means\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rapid.methods]\nclass-means = class_means:METHOD\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.syspath_prepend(str(TOY))
        yield
    sys.modules.pop("class_means", None)


class Referee:
    """Labels as many images rightly as the candidate's bound is high, and keeps a list of what it was asked for."""

    def __init__(self, before: Callable[[int], None] = lambda number: None) -> None:
        self.asked: list[str] = []
        self.last = 0.0
        self._before = before

    def __call__(self, path: Path, device: torch.device) -> Labeller:
        self._before(len(self.asked))
        bound = Bundle.open(path, "model").config.facts["bound"]
        self.asked.append(next(name for name, value in BOUNDS.items() if value == bound))
        self.last = time.time()
        right = list(BOUNDS.values()).index(bound) + 1

        def scores(images: Tensor) -> Tensor:
            # the bottom right pixel of each image is its label, and the one before it a number of 0 to 99
            labels, place = images[:, -1, -1].long(), images[:, -1, -2].long()
            guess = torch.where(place < 30 * right, labels, (labels + 1) % 2)
            return torch.nn.functional.one_hot(guess, 2).float()

        return scores


@pytest.fixture
def private(tmp_path: Path) -> Path:
    images = np.random.default_rng(0).integers(0, 256, (100, 8, 8), dtype=np.uint8)
    labels = np.arange(100) % 2
    images[:, -1, -1], images[:, -1, -2] = labels, np.arange(100)
    np.savez(tmp_path / "private.npz", images=images, labels=labels, classes=np.array(["a", "b"]))
    return tmp_path / "private.npz"


def tune(private: Path, referee: Referee, mean: float = 4.0, *, resume: bool = False, **changes: Any) -> Bundle:
    """A tune into `out` beside the private images, with a ledger there."""
    tree = {"method": "class-means", "image": {"size": 8}}
    candidates = {name: apply_overrides(tree, [f"private.bound={bound}"]) for name, bound in BOUNDS.items()}
    wanted: dict[str, Any] = {"epsilon": EPSILON, "delta": DELTA, "candidates": candidates} | changes
    return tune_private_bundle(
        None, PrivateImages(private), private.parent / "out", wanted.pop("candidates"), Scoring(referee, 0.1, {}),
        trials=Trials(mean=mean), device=CPU, resume=resume, ledger=private.parent / "ledger.jsonl", **wanted,
    )  # fmt: skip


def spent(private: Path) -> Balance:
    (found,) = balances(Ledger(private.parent / "ledger.jsonl").entries())
    return found


def born(path: Path) -> float:
    """When a file was made; infinity where its system does not tell."""
    told = subprocess.run(["stat", "--format=%W.%w", path], check=True, capture_output=True, text=True).stdout
    whole, _, words = told.strip().partition(".")
    part = re.search(r"\.(\d+)", words)
    return float(f"{whole}.{part[1]}") if part else math.inf


def files(out: Path) -> set[str]:
    return {path.relative_to(out).as_posix() for path in out.rglob("*")}


def test_the_best_of_those_drawn_is_released_and_nothing_else(private: Path, capfd: pytest.CaptureFixture[str]) -> None:
    referee, plans = Referee(), list[Selection]()
    bundle = tune(private, referee, 8.0, planned=plans.append)
    statement = bundle.privacy
    assert statement is not None
    chosen = statement["selection"]
    assert chosen["chosen"] == max(referee.asked, key=list(BOUNDS).index)
    assert bundle.config.settings["private"]["bound"] == BOUNDS[chosen["chosen"]]
    noise = next(release for release in statement["releases"] if release["name"] == "tuning-score")["noise_multiplier"]
    assert abs(chosen["score"] - (30 * (list(BOUNDS).index(chosen["chosen"]) + 1))) < 6 * noise + 11
    # the model, and the public record of the run
    assert files(bundle.path) == {
        "config.json", "model_index.json", "privacy.json", "README.md", "means", "means/config.json",
        "means/diffusion_pytorch_model.safetensors", "checkpoints", "checkpoints/lock", "checkpoints/run.json",
        "checkpoints/manifest.json",
    }  # fmt: skip
    # neither what is shown nor when the files were written tells the number of trials
    shown = capfd.readouterr()
    assert shown.out + shown.err == ""
    weights = bundle.path / "means"
    (moment,) = {path.stat().st_mtime for path in (weights, *weights.iterdir())}
    assert moment >= referee.last
    assert all(born(path) >= referee.last for path in weights.iterdir())
    # one charge, of everything
    assert [entry.kind for entry in Ledger(private.parent / "ledger.jsonl").entries()] == ["reserve", "spend", "settle"]
    assert spent(private).epsilon == prv_epsilon([plans[0].event], DELTA) <= statement["epsilon"] <= EPSILON
    assert "RDP" in spent(private).accountant
    words = privacy_in_words(statement)
    assert f"'{chosen['chosen']}', were chosen privately among 3; epsilon covers the choice" in words
    assert words in (bundle.path / "README.md").read_text()
    # a finished run costs nothing
    before = len(referee.asked)
    tune(private, referee, 8.0, resume=True)
    assert len(referee.asked) == before
    assert spent(private).epsilon == prv_epsilon([plans[0].event], DELTA)


def test_no_trial_begins_where_another_one_or_the_process_does(private: Path) -> None:
    """From weights that begin at a number which others know, one could tell which trial's were released."""
    begun = list[int]()

    def before(number: int) -> None:
        begun.append(torch.initial_seed())
        # classifiers that score have a fixed seed
        torch.manual_seed(0)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        tune(private, Referee(before), 8.0)
    assert len({*begun, 0, 5}) == len(begun) + 2


def test_memory_of_people_does_not_decide_the_pieces(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path: Path
) -> None:
    with np.load(digits) as images:
        np.savez(tmp_path / "private.npz", **images, person=np.arange(len(images["images"])) // 2)
    measured = apply_overrides(tiny_settings.model_dump(mode="json"), ["private.physical_batch=auto"])
    with pytest.raises(InputError, match="depends on the memory"):
        tune_private_bundle(
            public_bundle, PrivateImages(tmp_path / "private.npz", people=PeopleFrom("person")), tmp_path / "out",
            {"a": tiny_settings, "b": measured}, Scoring(Referee(), 0.1, {}), epsilon=8.0, delta=1e-4,
            trials=Trials(mean=2.0), device=torch.device("cuda"), resume=False, ledger=tmp_path / "ledger.jsonl",
        )  # fmt: skip
    assert not (tmp_path / "out").exists()


def stop_at(number: int) -> Callable[[int], None]:
    return lambda asked: request_stop() if asked == number else None


def test_a_stopped_run_goes_on_and_is_charged_once(private: Path) -> None:
    out = private.parent / "out"
    folder = out / "checkpoints" / "trials"
    referee = Referee(stop_at(0))
    with stop_on_signal(), pytest.raises(Stopped):
        tune(private, referee)
    assert folder.stat().st_mode & 0o077 == 0
    state = json.loads((folder / "choices.json").read_text())
    # the ledger has a hash of it, which must not be found by trying numbers
    assert len(state["nonce"]) == 64
    number = state["trials"]
    first = referee.asked[0]
    one = spent(private).epsilon
    again = Referee()
    bundle = tune(private, again, resume=True)
    # the interrupted trial goes on with its candidate, and the number of trials stays
    assert again.asked[0] == first
    assert len(again.asked) == number
    assert spent(private).epsilon == one
    assert bundle.privacy is not None
    assert not folder.exists()


def test_a_stopped_run_does_not_go_on_with_other_labels(private: Path) -> None:
    """Its trials would be scored on another data set, which one charge does not cover."""
    with stop_on_signal(), pytest.raises(Stopped):
        tune(private, Referee(stop_at(0)))
    with np.load(private) as archive:
        arrays = dict(archive)
    lines = len(Ledger(private.parent / "ledger.jsonl").entries())
    changed = arrays["labels"].copy()
    changed[:30] = 1 - changed[:30]
    np.savez(private, **arrays | {"labels": changed})
    other = Referee()
    with pytest.raises(InputError, match="has other labels than when the run in --out began"):
        tune(private, other, resume=True)
    assert not other.asked
    assert len(Ledger(private.parent / "ledger.jsonl").entries()) == lines
    # in another order they are the same
    order = np.random.default_rng(1).permutation(100)
    np.savez(private, images=arrays["images"][order], labels=arrays["labels"][order], classes=arrays["classes"])
    one = spent(private).epsilon
    tune(private, other, resume=True)
    assert spent(private).epsilon == one


def test_a_copy_of_a_stopped_run_is_charged_again(private: Path, recwarn: pytest.WarningsRecorder) -> None:
    out, copy = private.parent / "out", private.parent / "copy"
    with stop_on_signal(), pytest.raises(Stopped):
        tune(private, Referee(stop_at(0)))
    one = spent(private).epsilon
    shutil.copytree(out, copy)
    tune(private, Referee(), resume=True)
    assert spent(private).epsilon == one
    assert not recwarn.list
    # the same state put back: its last trials could be drawn again
    shutil.rmtree(out)
    copy.rename(out)
    tune(private, Referee(), resume=True)
    assert spent(private).epsilon > 1.5 * one
    assert [str(warning.message) for warning in recwarn.list] == [MOVED]


@pytest.mark.parametrize("times", [1, 2])
def test_on_another_disk_everything_begins_anew_with_a_warning(private: Path, times: int) -> None:
    """Also after it was moved back: the ledger has to take each place for another run."""
    out = private.parent / "out"
    with stop_on_signal(), pytest.raises(Stopped):
        tune(private, Referee(stop_at(0)))
    one = spent(private).epsilon
    for number in range(1, times + 1):
        # as `mv` does it between disks
        shutil.copytree(out, private.parent / "moved")
        shutil.rmtree(out)
        (private.parent / "moved").rename(out)
        with pytest.warns(UserWarning, match="^" + MOVED), stop_on_signal(), pytest.raises(Stopped):
            tune(private, Referee(stop_at(0)), resume=True)
        assert [run.releases for run in spent(private).runs] == [spent(private).runs[0].releases] * (number + 1)
    assert spent(private).epsilon > 1.4 * one
    # where it stopped it goes on at no cost, and without a warning
    before = spent(private).epsilon
    tune(private, Referee(), resume=True)
    assert spent(private).epsilon == before


@pytest.mark.filterwarnings("ignore:the earlier attempt was refused or did not stop in order")
def test_after_a_crash_everything_begins_anew(private: Path) -> None:
    def crash(asked: int) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        tune(private, Referee(crash))
    one = spent(private).epsilon
    with pytest.raises(InputError, match="holds an earlier run"):
        tune(private, Referee())
    assert spent(private).epsilon == one
    tune(private, Referee(), resume=True)
    assert spent(private).epsilon > 1.5 * one
    # the model's own statement is of the run that made it
    statement = json.loads((private.parent / "out" / "privacy.json").read_text())
    assert statement["epsilon"] == pytest.approx(one, rel=1e-3)


def test_beyond_the_limit_nothing_begins(private: Path) -> None:
    book = Ledger(private.parent / "ledger.jsonl")
    images = np.load(private)["images"]
    set_limit(book, book.account(image_digests(images)), Limit(1.0, DELTA))
    referee = Referee()
    with pytest.raises(PrivacyRefused, match="the limit of this data set"):
        tune(private, referee)
    assert not referee.asked
    assert not (private.parent / "out").exists()


def test_a_refused_trial_ends_it_and_stays_charged(private: Path) -> None:
    def refuse(asked: int) -> None:
        raise PrivacyRefused("the sets overlap")

    with pytest.raises(PrivacyRefused, match=r"a trial was refused.*charge for all trials stays.*the sets overlap"):
        tune(private, Referee(refuse))
    assert spent(private).epsilon > 0.9 * EPSILON
    assert not (private.parent / "out" / "checkpoints" / "trials").exists()
    assert not (private.parent / "out" / "privacy.json").exists()


def test_resuming_with_another_request_is_refused(private: Path) -> None:
    with stop_on_signal(), pytest.raises(Stopped):
        tune(private, Referee(stop_at(0)))
    with pytest.raises(InputError, match=r"another 'trials\.mean'"):
        tune(private, Referee(), 5.0, resume=True)


def test_a_run_of_a_version_with_other_releases_is_not_resumed(private: Path) -> None:
    with stop_on_signal(), pytest.raises(Stopped):
        tune(private, Referee(stop_at(0)))
    path = private.parent / "out" / "checkpoints" / "manifest.json"
    manifest = json.loads(path.read_text())
    for candidate in manifest["selection"]["candidates"]:
        candidate["budget"]["releases"][0]["spec"]["name"] = "earlier"
    path.write_text(json.dumps(manifest))
    before = spent(private)
    with pytest.raises(InputError, match="of another version, with other releases"):
        tune(private, Referee(), resume=True)
    assert spent(private) == before


def test_what_cannot_be_tuned(private: Path) -> None:
    tree = {"method": "class-means", "image": {"size": 8}}
    one = apply_overrides(tree, [])
    for changes, words in (
        ({"candidates": {}}, "there are none"),
        (
            {"candidates": {"a": one, "b": apply_overrides(tree, ["image.size=12"])}},
            "differ in their method or in image",
        ),
        ({"candidates": {"a": apply_overrides(tree, ["private.group_size=2"])}}, "leave it at 1"),
        ({"epsilon": 0.0}, "epsilon"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            tune(private, Referee(), **changes)
    with np.load(private) as archive:
        np.savez(private, images=archive["images"])
    with pytest.raises(InputError, match="has no labels"):
        tune(private, Referee())
    assert not (private.parent / "out").exists()
