"""The overlap check: its noise, its share of the budget, and what is refused, by the command as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from scipy import stats

from rapid.bundle.format import Bundle
from rapid.config.presets import apply_overrides
from rapid.config.sections import ImageSettings, PrivateSettings, Settings
from rapid.data import fit_images, load_images
from rapid.data.thumbnails import thumbnails
from rapid.dp import Ranks
from rapid.dp.accounting import Release, prv_epsilon, single_noise_multiplier
from rapid.dp.budget import allot
from rapid.dp.overlap import check_overlap, noisy_count, smallest_found
from rapid.errors import PrivacyRefused, RapidError
from rapid.stages import train_private_bundle

CPU = torch.device("cpu")


def test_the_count_has_gaussian_noise() -> None:
    # so much noise that rounding does not show
    release = Release(500.0, 1.0, 1)
    drawn = [noisy_count(37, release, Ranks()) for _ in range(3000)]
    assert all(isinstance(count, int) for count in drawn)
    assert stats.kstest(drawn, "norm", args=(37, 500)).pvalue > 1e-5
    assert abs(stats.pearsonr(drawn[1:], drawn[:-1]).statistic) < 0.1


@pytest.mark.parametrize("epsilon", [1e-4, 0.05, 1.0, 20.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-9])
def test_noise_of_one_release_in_closed_form(epsilon: float, delta: float) -> None:
    noise = single_noise_multiplier(epsilon, delta)
    loss = privacy_loss_distribution.from_gaussian_mechanism(noise, value_discretization_interval=epsilon / 1000)
    assert loss.get_delta_for_epsilon(epsilon) == pytest.approx(delta, rel=0.02)
    # numerical composition adds its own error
    assert epsilon * 0.999 <= prv_epsilon([Release(noise, 1.0, 1)], delta) <= 1.02 * epsilon + 6e-3


@pytest.mark.parametrize("probed", [False, True])
@pytest.mark.parametrize("epsilon", [0.2, 1.0, 10.0])
def test_the_check_is_part_of_the_budget(epsilon: float, probed: bool) -> None:
    settings = PrivateSettings(expected_batch=1000, steps=100)
    budget = allot(settings, 60_000, epsilon, 1e-6, probed=probed)
    assert budget.overlap is not None
    assert (budget.overlap.sample_rate, budget.overlap.steps) == (1, 1)
    denoiser = Release(budget.denoiser.noise_multiplier, budget.denoiser.sample_rate, 100)
    probe = budget.probe.releases() if budget.probe else []
    spent = prv_epsilon([denoiser, *probe, budget.overlap], 1e-6)
    assert spent == pytest.approx(budget.denoiser.epsilon())
    assert 0.97 * epsilon <= spent <= epsilon
    assert budget.overlap in budget.denoiser.releases()
    unchecked = apply_overrides({"private": settings.model_dump()}, ["private.overlap.share=0"]).private
    without = allot(unchecked, 60_000, epsilon, 1e-6, probed=probed)
    assert without.overlap is None
    assert without.probe == budget.probe
    assert 1 < budget.denoiser.noise_multiplier / without.denoiser.noise_multiplier < 1.01


def test_noise_is_never_smaller_than_needed() -> None:
    settings = PrivateSettings(expected_batch=10, steps=1)
    for size, least in ((100, 1.0), (10_000, 1.0), (100_000, 10.0)):
        overlap = allot(settings, size, 500.0, 1e-6, probed=False).overlap
        assert overlap == Release(least, 1.0, 1)
        assert smallest_found(overlap) == 9 * least


@pytest.fixture
def public_letters(public_bundle: Path, letters: Path) -> tuple[np.ndarray, np.ndarray]:
    """The public images and their thumbnails."""
    images = fit_images(load_images(letters, "-"), ImageSettings(size=32, channels=1), "-").images
    return images, Bundle.open(public_bundle, "base").thumbnails()


def test_the_refusal_follows_from_the_noisy_count_alone(
    tmp_path: Path, public_letters: tuple[np.ndarray, np.ndarray], capfd: pytest.CaptureFixture[str]
) -> None:
    images, public = public_letters
    others = np.random.default_rng(0).integers(0, 256, (60, 32, 32), np.uint8)
    release = Release(2.0, 1.0, 1)

    def check(asked: np.ndarray, name: str) -> int:
        file = tmp_path / name
        check_overlap(asked, public, release, file, Ranks(), size=60, delta=1e-3)
        return int(json.loads(file.read_text())["noisy_count"])

    assert -14 < check(others, "other.json") <= 12
    with pytest.raises(PrivacyRefused, match=r"about \d\d of the 60 private images .*; 18 or more") as refused:
        check(images, "same.json")
    count = json.loads((tmp_path / "same.json").read_text())["noisy_count"]
    assert f"about {count} of" in str(refused.value)
    assert 44 < count < 76
    assert f"at most epsilon {prv_epsilon([release], 1e-3):.3g} at delta 0.001" in str(refused.value)
    # the recorded count decides, whatever the images are now
    for decided, changed in (("12", images), ("13", others)):
        (tmp_path / "kept.json").write_text(f'{{"noisy_count": {decided}}}')
        if decided == "12":
            assert check(changed, "kept.json") == 12
        else:
            with pytest.raises(PrivacyRefused, match="about 13 of"):
                check(changed, "kept.json")
    (tmp_path / "kept.json").write_text("{")
    with pytest.raises(RapidError, match="damaged"):
        check(others, "kept.json")
    # nothing else is written or shown
    assert {p.name for p in tmp_path.iterdir()} == {"other.json", "same.json", "kept.json"}
    assert all(set(json.loads((tmp_path / f"{n}.json").read_text())) == {"noisy_count"} for n in ("other", "same"))
    shown = [part.split("|")[0] for part in capfd.readouterr().err.replace("\r", "\n").splitlines() if part]
    assert {part.split(":")[0].strip() for part in shown} == {"overlap check"}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rapid", "train-private", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_private_images_that_are_public_are_refused_once_and_for_all(
    tmp_path: Path, public_bundle: Path, letters: Path
) -> None:
    out = tmp_path / "out"
    arguments = ["--base", str(public_bundle), "--private", str(letters), "--epsilon", "20", "--out", str(out)]
    first = run(*arguments)
    assert first.returncode == 3, first.stderr
    (message,) = [line for line in first.stderr.splitlines() if line.startswith("rapid: ")]
    assert "--private and --base overlap" in message
    assert "Nothing was trained" in message
    assert "give a new --out" in message
    assert "private training" not in first.stderr
    assert sorted(p.name for p in out.iterdir()) == ["checkpoints"]
    files = {p: p.read_text() for p in (out / "checkpoints").iterdir()}
    assert {p.name for p in files} == {"plan.json", "overlap.json", "run.json", "lock"}
    again = run(*arguments, "--resume")
    assert again.returncode == 3
    assert message in again.stderr.splitlines()
    assert "overlap check" not in again.stderr
    assert {p: p.read_text() for p in (out / "checkpoints").iterdir()} == files
    # with less noise than the run was begun with
    other = run(*arguments, "--resume", "--set", "private.overlap.share=0.2")
    assert other.returncode == 2
    assert "the earlier run differs in 'overlap'" in other.stderr


def test_a_resumed_training_is_not_checked_again(
    tmp_path: Path, public_bundle: Path, letters: Path, digits: Path, tiny_settings: Settings
) -> None:
    def train(private: Path, out: str, *, resume: bool) -> None:
        train_private_bundle(
            public_bundle, private, tmp_path / out, tiny_settings, epsilon=20.0, delta=None, device=CPU, resume=resume
        )

    with pytest.raises(PrivacyRefused):
        train(letters, "out", resume=False)
    record = tmp_path / "out" / "checkpoints" / "overlap.json"
    record.write_text('{"noisy_count": 0}')
    train(letters, "out", resume=True)
    assert not record.exists()
    # nor is a finished one
    train(letters, "out", resume=True)
    assert not record.exists()


def test_the_statement_and_the_card_tell_of_the_check(private: Bundle) -> None:
    assert private.privacy is not None
    check = private.privacy["overlap_check"]
    expected = allot(private.settings.private, 100, 10.0, private.privacy["delta"], probed=True).overlap
    assert expected is not None
    assert check["noise_multiplier"] == expected.noise_multiplier
    assert (check["sample_rate"], check["steps"]) == (1, 1)
    assert "ChaCha20" in check["noise_source"]
    assert check["almost_surely_refused_from"] == smallest_found(expected)
    card = (private.path / "README.md").read_text()
    assert "| overlap check | noise_multiplier" in card
    assert f"copies of {smallest_found(expected)} of them or more" in card
    assert not (private.path / "thumbnails.npy").exists()
    assert private.config.thumbnails is None


def test_without_a_share_there_is_no_check_and_the_statement_says_so(
    tmp_path: Path, public_bundle: Path, letters: Path, tiny_settings: Settings
) -> None:
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), ["private.overlap.share=0"])
    bundle = train_private_bundle(
        public_bundle, letters, tmp_path / "out", settings, epsilon=20.0, delta=None, device=CPU, resume=False
    )
    assert bundle is not None
    assert bundle.privacy is not None
    assert bundle.privacy["overlap_check"] == "not made"
    card = (bundle.path / "README.md").read_text()
    assert "| overlap check | not made |" in card
    assert "It was not checked whether private images are among the public ones" in card


def test_a_check_without_power_is_warned_of(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: Settings
) -> None:
    with pytest.warns(UserWarning, match="overlap check would need 223 images .* --private has 100"):
        train_private_bundle(
            public_bundle, digits, tmp_path / "out", tiny_settings, epsilon=1.0, delta=None, device=CPU, resume=False
        )
    assert "the private images are too few for it to be sure" in (tmp_path / "out" / "README.md").read_text()


def test_prints_of_both_stages_are_in_one_form(
    public_letters: tuple[np.ndarray, np.ndarray],
) -> None:
    images, public = public_letters
    assert (thumbnails(images) == public).all()
