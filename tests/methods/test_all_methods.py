"""What every method must keep: a killed run goes on and is charged for what it took, nothing but releases depends on a
private image, and the ledger names each release.

RAPID alone has more tests of kills and of replay, in `tests/dp/`.
"""

from __future__ import annotations

import json
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from methods.tiny import TINY
from tests_charges import budget_of, charged, same_as, steps_charged, steps_in
from tests_children import train_privately, train_until
from tests_process import start
from tests_replay import LAST, Stage, same_with_held_results

import rapid.methods
from rapid.bundle import Bundle
from rapid.cli import main
from rapid.config.sections import MethodSettings
from rapid.data import load_images, sample_path
from rapid.data.stored import image_digests
from rapid.dp.ledger import Ledger
from rapid.dp.spending import balances
from rapid.methods import apply_overrides
from rapid.stages.public import build_public_bundle

METHODS = sorted([*TINY, "rapid"])
STEPS = 3
DELTA = 1e-4
"""That of `train_privately`."""
COMMON = (
    f"private.steps={STEPS}",
    "private.expected_batch=80",
    "private.physical_batch=64",
    "private.checkpoint_seconds=0",
)
"""Large batches: the image that is exchanged must be drawn. Large pieces of them: tracing is what takes the time."""
MORE = {
    # the controller decides by its accuracy from the second generator step on
    "dp-gan": ("private.controller.decay=0",),
}


@dataclass(frozen=True)
class Variant:
    """A method with settings that give it more to do.

    Attributes:
        method: its name.
        overrides: settings.
        warm: whether it starts from a base of public digits, which its tiny settings do without.
        scratch: whether it starts without the base that its tiny settings have.
        epsilon: of the run.
        runs: a file of rapid that runs if these settings have an effect.
    """

    method: str
    overrides: tuple[str, ...] = ()
    warm: bool = False
    scratch: bool = False
    epsilon: float = 2.0
    runs: str = "stages/private.py"


VARIANTS = {
    **{method: Variant(method) for method in METHODS},
    # Warm and WarmExt: the first step starts from a base, and every step mixes in a public gradient
    "dp-classifier-warm": Variant(
        "dp-classifier",
        ("warmup.kept=20", "private.public_share=0.25", "private.public_batch=8"),
        warm=True,
        runs="methods/dp_classifier/public_gradient.py",
    ),
    "dp-diffusion-scratch": Variant("dp-diffusion", ("denoiser.pretrained=false",), scratch=True),
    # with a small epsilon 100 images tell too little about their tones, and no curve is fitted
    **{
        f"{method}-tones": Variant(method, ("private.tones.share=0.2",), epsilon=200.0, runs="sampling/generate.py")
        for method in ("dp-diffusion", "dp-gan", "dpdm")
    },
}
"""By name of the case."""

pytestmark = pytest.mark.filterwarnings("ignore:at this epsilon")


@dataclass(frozen=True)
class Case:
    """A method, and a run of it that nobody killed."""

    variant: Variant
    settings: MethodSettings
    base: Path | None
    bundle: Bundle
    ledger: Path

    @property
    def epsilon(self) -> float:
        return self.variant.epsilon


def public_digits(path: Path) -> Path:
    """60 digits that are not among the private ones, of the same classes."""
    digits = load_images(sample_path("digits"), "public")
    assert digits.labels is not None
    part = slice(100, 160)
    np.savez(path, images=digits.images[part], labels=digits.labels[part], classes=np.array(digits.classes))
    return path


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, letters: Path, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    variant = VARIANTS[request.param]
    method = variant.method
    folder = tmp_path_factory.mktemp(request.param)
    base: Path | None = None
    if method == "rapid":
        tree = request.getfixturevalue("tiny_settings").model_dump(mode="json")
        base = request.getfixturevalue("public_bundle")
    else:
        tree = TINY[method]["settings"] | (TINY[method]["public"] or {}) | {"method": method}
    settings = apply_overrides(tree, [*COMMON, *MORE.get(method, ()), *variant.overrides])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if base is None and not variant.scratch and (variant.warm or TINY[method]["public"] is not None):
            public = public_digits(folder / "public.npz") if variant.warm else letters
            base = build_public_bundle([public], folder / "base", settings, torch.device("cpu"), resume=False).path
        bundle = train_privately(base, digits, folder / "out", settings, folder / "ledger.jsonl", variant.epsilon)
    return Case(variant, settings, base, bundle, folder / "ledger.jsonl")


def folder_of(method: str) -> str:
    return f"methods/{method.replace('-', '_')}"


def test_no_method_is_left_out() -> None:
    root = Path(str(rapid.methods.__file__)).parents[1]
    assert {str(path.parent.relative_to(root)) for path in root.glob("methods/*/private_stage.py")} == {
        folder_of(method) for method in METHODS
    }


@pytest.mark.parametrize(
    ("until", "twice"),
    [
        # the first step of the first training is saved, and the noisy gradient of the second is out
        pytest.param(("dp/access.py", "update", 2), 1, id="released-and-not-saved"),
        pytest.param(("files.py", "write_json", "config.json"), 0, id="components-written"),
    ],
)
def test_a_killed_run_goes_on_and_ends_with_all_of_its_bundle(
    case: Case, digits: Path, tmp_path: Path, until: tuple[str | int, ...], twice: int
) -> None:
    """It is charged for one step more than a quiet run if that step was released and not saved, and else for none."""
    out, ledger = tmp_path / "out", tmp_path / "ledger.jsonl"
    child = start(train_until, until, case.base, digits, out, case.settings, ledger, case.epsilon)
    child.join()
    assert child.exitcode == -signal.SIGKILL
    before, (reserved,) = charged(ledger), balances(Ledger(ledger).entries())
    assert not (out / "config.json").exists()
    trained = next(release.name for release in budget_of(out).releases if release.spec.kind == "dp-sgd")
    assert steps_in(out / "checkpoints" / f"{trained}.pt") == (1 if twice else STEPS)
    # until it goes on, it is charged for all that it may take
    assert reserved.epsilon == pytest.approx(case.epsilon, rel=1e-3)
    bundle = train_privately(case.base, digits, out, case.settings, ledger, case.epsilon)
    same_as(bundle, ledger, case.bundle, case.ledger, kills=twice)
    after = charged(ledger)
    assert after[: len(before)] == before
    assert (after[-1].kind, after[-1].attempt) == ("settle", 2)
    assert steps_charged(ledger) - steps_charged(case.ledger) == ({trained: 1} if twice else {})
    (found,) = balances(after)
    assert (found.epsilon > reserved.epsilon) == bool(twice)


def test_with_the_same_noisy_results_another_image_changes_nothing(case: Case, digits: Path, tmp_path: Path) -> None:
    """Results of releases are all that a private image has an effect on.

    Three runs have the same random bytes. In the second, another image is in the place of one; in the third, that image
    contributes nothing. Both compute noisy results of their own, which differ from those of the first run, and go on
    with those of the first. So a choice by released results, such as that of the GAN's controller, is the same in all
    three, and a difference would be an effect past the releases. None is allowed in what is executed, in any checkpoint
    or file of run folder, bundle and ledger, in any weight, on standard output or error, or among the warnings.
    """
    stage = Stage(case.settings, case.base, load_images(digits, "private"), tmp_path, epsilon=case.epsilon, delta=DELTA)
    first = stage.run()
    own = {f"{folder_of(case.variant.method)}/{name}" for name in ("private_stage.py", "__init__.py")}
    assert own | {case.variant.runs} <= {name for name, _, _ in first.executed}
    # each step and each query is there
    assert len(first.released) == sum(steps_charged(case.ledger).values())
    white = np.full(stage.images.images.shape[1:], 255, np.uint8)
    same_with_held_results(first, stage.run(image=white, held=first.released))
    same_with_held_results(first, stage.run(silent=LAST, held=first.released))


def test_the_ledger_names_each_release(
    case: Case, digits: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One account, one attempt, all releases of the budget in its lines, and the epsilon of the statement."""
    budget, privacy = budget_of(case.bundle.path), case.bundle.privacy
    assert privacy is not None
    assert privacy["epsilon"] == pytest.approx(case.epsilon, rel=1e-3)
    assert [release["name"] for release in privacy["releases"]] == list(budget.names)
    entries = Ledger(case.ledger).entries()
    assert [entries[0].kind, entries[-1].kind] == ["reserve", "settle"]
    for entry in (entries[0], entries[-1]):
        assert {one.name: sum(one.steps.values()) for one in entry.releases} == {
            release.name: release.spec.steps for release in budget.releases
        }
    account = Ledger(case.ledger).account(image_digests(load_images(digits, "private").images))
    assert {entry.dataset for entry in entries} == {account}
    monkeypatch.setenv("RAPID_LEDGER", str(case.ledger))
    assert main(["ledger", "show", "--json", str(digits)]) == 0
    (shown,) = json.loads(capsys.readouterr().out)["datasets"]
    (run,) = shown["runs"]
    assert (shown["dataset"], run["kind"], run["attempt"]) == (account, "settle", 1)
    assert [release[0] if isinstance(release, list) else release["name"] for release in run["releases"]] == list(
        budget.names
    )
    assert shown["epsilon"] == pytest.approx(privacy["epsilon"], abs=1e-5)
