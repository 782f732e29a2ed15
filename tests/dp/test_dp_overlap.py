"""The overlap check: its noise, its share of the budget, and what is refused, by the command as a process."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from tests_process import run

from rapid.bundle import Bundle, Thumbnails
from rapid.config.sections import ImageSettings
from rapid.data import ImageSet, fit_images, load_images
from rapid.data.private import PrivateImages
from rapid.data.thumbnails import thumbnails
from rapid.dp import Budget, PrivateAccess, PublicFacts, QuerySpec, Release, calibrate
from rapid.dp.accounting import prv_epsilon
from rapid.dp.calibration import single_noise_multiplier
from rapid.dp.events import gaussian_event
from rapid.dp.overlap import check_overlap, overlap_spec, smallest_found
from rapid.errors import InputError, PrivacyRefused, RapidError
from rapid.methods import apply_overrides
from rapid.methods.rapid.private_stage import releases
from rapid.methods.rapid.settings import RapidSettings
from rapid.stages.private import train_private_bundle
from rapid.training import RunFolder

CPU = torch.device("cpu")


@pytest.mark.parametrize("epsilon", [1e-4, 0.05, 1.0, 20.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-9])
def test_noise_of_one_release_in_closed_form(epsilon: float, delta: float) -> None:
    noise = single_noise_multiplier(epsilon, delta)
    loss = privacy_loss_distribution.from_gaussian_mechanism(noise, value_discretization_interval=epsilon / 1000)
    assert loss.get_delta_for_epsilon(epsilon) == pytest.approx(delta, rel=0.02)
    # numerical composition adds its own error
    assert epsilon * 0.999 <= prv_epsilon([gaussian_event(noise)], delta) <= 1.02 * epsilon + 6e-3


def settings_of(**private: object) -> RapidSettings:
    return RapidSettings.model_validate({"private": private})


def budget_of(
    settings: RapidSettings, size: int, epsilon: float, delta: float = 1e-6, *, classes: tuple[str, ...] = ()
) -> Budget:
    """That of RAPID's private stage."""
    return calibrate(releases(settings, PublicFacts(size, classes, (32, 32)), None), epsilon=epsilon, delta=delta)


@pytest.mark.parametrize("classes", [(), ("a", "b")])
@pytest.mark.parametrize("epsilon", [0.2, 1.0, 10.0])
def test_the_check_is_part_of_the_budget(epsilon: float, classes: tuple[str, ...]) -> None:
    budget = budget_of(settings_of(expected_batch=1000, steps=100), 60_000, epsilon, classes=classes)
    overlap, denoiser = budget.release("overlap"), budget.release("denoiser")
    assert (overlap.spec.sample_rate, overlap.spec.steps) == (1, 1)
    probe = [budget.release("probe").event()] if classes else []
    spent = prv_epsilon([denoiser.event(), *probe, overlap.event()], 1e-6)
    assert spent == pytest.approx(budget.spent)
    assert 0.97 * epsilon <= spent <= epsilon
    assert overlap.event() in budget.events()
    unchecked = settings_of(expected_batch=1000, steps=100, overlap={"share": 0})
    without = budget_of(unchecked, 60_000, epsilon, classes=classes)
    assert "overlap" not in without.names
    assert ("probe" in without.names) == bool(classes)
    if classes:
        assert without.release("probe") == budget.release("probe")
    assert 1 < denoiser.noise_multiplier / without.main.noise_multiplier < 1.01


def test_noise_is_never_smaller_than_needed() -> None:
    settings = settings_of(expected_batch=10, steps=1)
    for size, least in ((100, 1.0), (10_000, 1.0), (100_000, 10.0)):
        overlap = budget_of(settings, size, 500.0).release("overlap")
        assert overlap.noise_multiplier == overlap.noise_stddev == least
        assert overlap.event() == gaussian_event(least)
        assert smallest_found(overlap) == 9 * least


@pytest.fixture
def public_letters(public_bundle: Path, letters: Path) -> tuple[np.ndarray, np.ndarray]:
    """The public images and their thumbnails."""
    images = fit_images(load_images(letters, "-"), ImageSettings(size=32, channels=1), "-").images
    return images, Bundle.open(public_bundle, "base").component("thumbnails", Thumbnails).rows


RELEASE = Release(
    spec=QuerySpec.model_validate(overlap_spec(60, 0.05).model_dump() | {"share": None}), noise_multiplier=2.0
)
BUDGET = Budget(epsilon=10, delta=1e-3, dataset_size=60, releases=(RELEASE,))


def test_the_refusal_follows_from_the_noisy_count_alone(
    tmp_path: Path, public_letters: tuple[np.ndarray, np.ndarray], capfd: pytest.CaptureFixture[str]
) -> None:
    images, public = public_letters
    others = np.random.default_rng(0).integers(0, 256, (60, 32, 32), np.uint8)

    def file(name: str) -> Path:
        return tmp_path / name / "checkpoints" / "overlap.pt"

    def check(asked: np.ndarray, name: str) -> int:
        asked_images = ImageSet(asked, None, (), "private")
        facts, run_folder = PublicFacts.of(asked_images), RunFolder(tmp_path / name)
        check_overlap(PrivateAccess(asked_images, facts, BUDGET, run_folder, device=CPU), public)
        return recorded(name)

    def recorded(name: str) -> int:
        return round(torch.load(file(name), weights_only=True)["result"].item())

    assert -14 < check(others, "other") <= 12
    with pytest.raises(PrivacyRefused, match=r"about \d\d of the 60 private images .*; 18 or more") as refused:
        check(images, "same")
    count = recorded("same")
    assert f"about {min(count, 60)} of" in str(refused.value)
    assert 44 < count < 76
    told = re.search(r"at most epsilon ([0-9.]+) at delta 0.001,", str(refused.value))
    assert told
    assert 0 <= float(told[1]) - prv_epsilon([RELEASE.event()], 1e-3) <= 0.01
    # the recorded count decides, whatever the images are now
    state = torch.load(file("other"), weights_only=True)
    assert check(images, "other") == recorded("other")
    for decided, changed in ((12, images), (13, others)):
        file("kept").parent.mkdir(parents=True, exist_ok=True)
        torch.save(state | {"result": torch.tensor([float(decided)])}, file("kept"))
        if decided == 12:
            assert check(changed, "kept") == 12
        else:
            with pytest.raises(PrivacyRefused, match="about 13 of"):
                check(changed, "kept")
    file("kept").write_text("{")
    with pytest.raises(RapidError, match="damaged"):
        check(others, "kept")
    # nothing else is written or shown
    for name in ("other", "same", "kept"):
        assert [p.relative_to(tmp_path / name) for p in (tmp_path / name).rglob("*") if p.is_file()] == [
            Path("checkpoints/overlap.pt")
        ]
    assert all(set(torch.load(file(n), weights_only=True)) == {"step", "result", "release"} for n in ("other", "same"))
    shown = [part.split("|")[0] for part in capfd.readouterr().err.replace("\r", "\n").splitlines() if part]
    assert {part.split(":")[0].strip() for part in shown} == {"overlap"}


def test_private_images_that_are_public_are_refused_once_and_for_all(
    tmp_path: Path, public_bundle: Path, letters: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["--base", str(public_bundle), "--private", str(letters), "--epsilon", "20", "--out", str(out)]
    first = run("train-private", *arguments)
    assert first.returncode == 3, first.stderr
    (message,) = [line for line in first.stderr.splitlines() if line.startswith("rapid: ")]
    assert "--private and --base overlap" in message
    assert "Nothing was trained" in message
    assert "give a new --out" in message
    assert not any(line.startswith(("probe", "denoiser", "latents")) for line in first.stderr.splitlines())
    assert sorted(p.name for p in out.iterdir()) == ["checkpoints"]
    files = {p: p.read_bytes() for p in (out / "checkpoints").iterdir()}
    assert {p.name for p in files} == {"manifest.json", "overlap.pt", "run.json", "lock"}
    again = run("train-private", *arguments, "--resume")
    assert again.returncode == 3
    assert message in again.stderr.splitlines()
    assert not any(line.startswith("overlap") for line in again.stderr.splitlines())
    assert {p: p.read_bytes() for p in (out / "checkpoints").iterdir()} == files
    # with less noise than the run was begun with
    other = run("train-private", *arguments, "--resume", "--set", "private.overlap.share=0.2")
    assert other.returncode == 2
    assert "holds a run with another 'settings.private.overlap.share'" in other.stderr


def test_a_resumed_training_keeps_the_result_of_its_check(
    tmp_path: Path, public_bundle: Path, letters: Path, tiny_settings: RapidSettings
) -> None:
    def train(*, resume: bool) -> None:
        train_private_bundle(
            public_bundle,
            PrivateImages(letters),
            tmp_path / "out",
            tiny_settings,
            epsilon=20.0,
            delta=None,
            device=CPU,
            resume=resume,
        )

    with pytest.raises(PrivacyRefused):
        train(resume=False)
    record = tmp_path / "out" / "checkpoints" / "overlap.pt"
    first = record.read_bytes()
    with pytest.raises(PrivacyRefused):
        train(resume=True)
    assert record.read_bytes() == first
    # another in its place is refused
    torch.save(torch.load(record, weights_only=True) | {"result": torch.zeros(1, dtype=torch.float64)}, record)
    with pytest.raises(InputError, match=r"holds another checkpoints/overlap\.pt than this run saved"):
        train(resume=True)


def test_the_statement_and_the_card_tell_of_the_check(private: Bundle) -> None:
    assert private.privacy is not None
    (check,) = [one for one in private.privacy["releases"] if one["name"] == "overlap"]
    settings = private.settings_as(RapidSettings)
    delta, classes = private.privacy["delta"], private.config.classes
    expected = budget_of(settings, 100, 10.0, delta, classes=classes).release("overlap")
    assert check["noise_multiplier"] == expected.noise_multiplier
    assert (check["sample_rate"], check["steps"]) == (1, 1)
    assert "ChaCha20" in check["noise_source"]
    card = (private.path / "README.md").read_text()
    assert "| overlap | number of private images with a near-duplicate among the public ones" in card
    words = f"copies of {smallest_found(expected)} of them or more"
    assert words in card
    assert any(words in note for note in private.privacy["notes"])
    assert not list(private.path.rglob("thumbnails*"))
    assert not private.has("thumbnails")


def test_without_a_share_there_is_no_check_and_the_statement_says_so(
    tmp_path: Path, public_bundle: Path, letters: Path, tiny_settings: RapidSettings
) -> None:
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), ["private.overlap.share=0"])
    bundle = train_private_bundle(
        public_bundle,
        PrivateImages(letters),
        tmp_path / "out",
        settings,
        epsilon=20.0,
        delta=None,
        device=CPU,
        resume=False,
    )
    assert bundle is not None
    assert bundle.privacy is not None
    assert [one["name"] for one in bundle.privacy["releases"]] == ["probe", "denoiser"]
    words = "It was not checked whether private images are among the public ones"
    assert any(words in note for note in bundle.privacy["notes"])
    card = (bundle.path / "README.md").read_text()
    assert "| overlap |" not in card
    assert words in card


def test_a_check_without_power_is_warned_of(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings
) -> None:
    with pytest.warns(UserWarning, match="overlap check would need 223 images .* --private has 100"):
        train_private_bundle(
            public_bundle,
            PrivateImages(digits),
            tmp_path / "out",
            tiny_settings,
            epsilon=1.0,
            delta=None,
            device=CPU,
            resume=False,
        )
    assert "the private images are too few for it to be sure" in (tmp_path / "out" / "README.md").read_text()


def test_thumbnails_of_both_stages_are_in_one_form(
    public_letters: tuple[np.ndarray, np.ndarray],
) -> None:
    images, public = public_letters
    assert (thumbnails(images) == public).all()
