"""Training on several ranks, started for real by torchrun: the inputs of the guarantee, and what a lost rank leaves."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import stats
from tests_process import wait_for
from tests_ranks import ends_of, torchrun, two_ranks
from tests_support import module_of

from rapid.bundle import Bundle
from rapid.dp import PublicFacts, Ranks, calibrate, default_delta
from rapid.dp.correlation import coefficients
from rapid.errors import LostRank
from rapid.methods import apply_overrides
from rapid.methods.rapid.private_stage import releases
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser
from rapid.ranks import _contact

PROGRAM = Path(__file__).with_name("rank_program.py")
Result = dict[str, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    """What two ranks computed."""
    out = tmp_path_factory.mktemp("ranks")
    process = torchrun(PROGRAM, out)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return [torch.load(out / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_the_sums_of_the_ranks_add_up_to_that_of_one_process(results: list[Result]) -> None:
    assert [result["count"] for result in results] == [2, 2]
    alone = module_of(PROGRAM).sum_of_batch(Ranks())
    for result in results:
        torch.testing.assert_close(result["sum"], alone, rtol=1e-4, atol=1e-6)
    assert torch.equal(results[0]["sum"], results[1]["sum"])


def test_the_parts_together_are_a_poisson_sample(results: list[Result]) -> None:
    sizes = np.array(results[0]["drawn"]) + np.array(results[1]["drawn"])
    rate = 10 / 41
    cuts = [-1, 6, 7, 8, 9, 10, 11, 12, 13, 41]
    counts = np.histogram(sizes, np.array(cuts) + 0.5)[0]
    assert stats.chisquare(counts, 400 * np.diff(stats.binom.cdf(cuts, 41, rate))).pvalue > 1e-6
    assert abs(stats.pearsonr(results[0]["drawn"], results[1]["drawn"]).statistic) < 0.25


def test_noise_is_added_exactly_once(results: list[Result]) -> None:
    for first, second in zip(results[0]["noise"], results[1]["noise"], strict=True):
        assert torch.equal(first, second)
    noise = torch.cat(results[0]["noise"]).numpy()
    # noise_multiplier * clip_norm / expected_batch = 2 * 0.5 / 1
    assert stats.kstest(noise, "norm").pvalue > 1e-5
    steps = torch.stack(results[0]["noise"]).double()
    assert torch.corrcoef(steps).fill_diagonal_(0).abs().max() < 0.2


def test_correlated_noise_is_the_same_on_all_ranks(results: list[Result]) -> None:
    assert torch.equal(results[0]["banded"], results[1]["banded"])
    rows, chosen = results[0]["banded"].double() * 10, coefficients(3, 6)
    # encoded again it is white: each number has its noise from exactly one rank
    white = sum(c * torch.cat([torch.zeros(j, rows.shape[1]), rows[: 6 - j]]) for j, c in enumerate(chosen))
    assert stats.kstest(white.flatten().numpy(), "norm").pvalue > 1e-5
    assert torch.corrcoef(white).fill_diagonal_(0).abs().max() < 0.2


def test_counts_of_the_ranks_add_up_with_noise_once(results: list[Result]) -> None:
    assert results[0]["counts"] == results[1]["counts"]
    assert stats.kstest((np.array(results[0]["counts"]) - 2001) / 100, "norm").pvalue > 1e-5


def test_releases_of_an_access_are_those_of_all_images_and_are_made_once(results: list[Result]) -> None:
    images = np.arange(41 * 16).reshape(41, 16) % 256 / 1e4
    clipped = images * np.minimum(1, 0.5 / np.linalg.norm(images, axis=1))[:, None]
    for result in results:
        first, again = result["queries"]["asked"]
        assert first["count"] == 14
        assert first["histogram"].tolist() == [14, 14, 13]
        np.testing.assert_allclose(first["mean"], clipped.mean(0), rtol=0, atol=2e-4)
        for name, found in first.items():
            for other in (again, results[0]["queries"]["asked"][0]):
                torch.testing.assert_close(found, other[name], rtol=0, atol=0)
    # only the first rank keeps the record
    assert results[0]["queries"]["steps"] == {"count": 1, "mean": 1, "histogram": 1, "any": 3}


def test_a_rank_without_examples_takes_the_same_steps(results: list[Result]) -> None:
    for result in results:
        assert result["lonely steps"] == 3
        for first, second in zip(result["lonely"], results[0]["lonely"], strict=True):
            assert torch.equal(first, second)


def test_a_failure_is_everybodys_and_told_once(results: list[Result]) -> None:
    for failing in (0, 1):
        seen = [result["failure"][failing] for result in results]
        assert {message for message, _, _ in seen} == {f"private {failing}: rank {failing} has no file"}
        assert {field for _, field, _ in seen} == {"private"}
        assert [told for _, _, told in seen] == [failing != 0, failing != 1]
    for result in results:
        assert "--private: not the same on all ranks" in result["disagreement"]
        assert result["shared"] == {"from": 0}


def arguments(base: Path, private: Path, out: Path, *more: str) -> list[str]:
    command = ["train-private", "--base", str(base), "--private", str(private), "--epsilon", "8"]
    return [*command, "--out", str(out), *more]


def test_train_private_on_two_ranks(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings
) -> None:
    out = tmp_path / "out"
    process = torchrun("-m", "rapid", *arguments(public_bundle, digits, out, "--set", "private.multiplicity=2"))
    output, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert output.count("private bundle:") == 1
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), ["private.multiplicity=2"])
    assert isinstance(settings, RapidSettings)
    bundle = Bundle.open(out, "out", "private")
    specs = releases(settings, PublicFacts(100, bundle.config.classes, (28, 28)), None)
    budget = calibrate(specs, epsilon=8.0, delta=default_delta(100))
    statement = json.loads((out / "privacy.json").read_text())
    assert statement["noise_multiplier"] == budget.main.noise_multiplier
    assert statement["sample_rate"] == budget.main.spec.sample_rate == 0.2
    assert statement["steps"] == budget.main.spec.steps == 3
    assert statement["multiplicity"] == 2
    assert statement["epsilon"] == pytest.approx(budget.spent, abs=1e-5)
    assert bundle.component("denoiser", Denoiser).num_classes == 10


def test_two_images_on_two_ranks(tmp_path: Path, public_bundle: Path, digits: Path) -> None:
    with np.load(digits) as archive:
        np.savez(tmp_path / "two.npz", images=archive["images"][:2], labels=np.zeros(2, np.int64))
    out = tmp_path / "out"
    ends = ends_of(two_ranks(*arguments(public_bundle, tmp_path / "two.npz", out, "--set", "private.expected_batch=1")))
    assert [end.returncode for end in ends] == [0, 0], ends
    assert json.loads((out / "privacy.json").read_text())["dataset_size"] == 2


def test_bad_input_is_said_once(tmp_path: Path, public_bundle: Path) -> None:
    ends = ends_of(two_ranks(*arguments(public_bundle, tmp_path / "none", tmp_path / "out")))
    assert [end.returncode for end in ends] == [2, 2]
    assert sum(end.stderr.count("does not exist; give a folder of images") for end in ends) == 1
    assert not (tmp_path / "out").exists()


def test_an_overlap_is_refused_once(tmp_path: Path, public_bundle: Path, letters: Path) -> None:
    out = tmp_path / "out"
    ends = ends_of(two_ranks(*arguments(public_bundle, letters, out, "--set", "private.overlap.share=0.5")))
    assert [end.returncode for end in ends] == [3, 3]
    assert sum(end.stderr.count("--private and --base overlap") for end in ends) == 1
    assert sorted(p.name for p in out.iterdir()) == ["checkpoints"]


@pytest.mark.parametrize("error", [dist.DistBackendError, dist.DistNetworkError, RuntimeError])
def test_errors_of_a_backend_are_a_lost_rank(error: type[RuntimeError]) -> None:
    """With NCCL they are raised where an operation is waited for; see `rapid.ranks.BLOCKING_WAIT`."""
    told = "NCCL communicator was aborted on rank 1. Original reason for failure was: remote process exited"
    words = r"lost contact with another rank \(NCCL communicator was aborted on rank 1\)"
    with pytest.raises(LostRank, match=words), _contact():
        raise error(told)


def test_a_killed_rank_ends_the_job_which_can_be_resumed(tmp_path: Path, public_bundle: Path, digits: Path) -> None:
    out = tmp_path / "out"
    more = ("--set", "private.steps=120", "--set", "private.checkpoint_seconds=0")
    process = torchrun("-m", "rapid", *arguments(public_bundle, digits, out, *more))
    assert process.stderr is not None
    shown = ""
    while "denoiser  " not in shown:
        character = process.stderr.read(1)
        assert character, shown
        shown += character
    wait_for(out / "checkpoints" / "denoiser.pt")
    os.kill(child_of_rank(process.pid, 1), signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    # the last words if torchrun's signal comes before the other rank has noticed
    hints = ("go on with --resume", "start all ranks again with --resume", "rerun the command with --resume")
    assert any(hint in errors for hint in hints)
    assert "SIGKILL" in errors
    assert not (out / "privacy.json").exists()
    assert 0 < torch.load(out / "checkpoints" / "denoiser.pt", weights_only=True)["step"] < 120
    again = torchrun("-m", "rapid", *arguments(public_bundle, digits, out, *more, "--resume"))
    _, errors = again.communicate(timeout=180)
    assert again.returncode == 0, errors
    assert json.loads((out / "privacy.json").read_text())["steps"] == 120


def child_of_rank(parent: int, rank: int) -> int:
    """The process that torchrun started for a rank."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                status = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                if int(status[1]) == parent and f"RANK={rank}" in (folder / "environ").read_text().split("\0"):
                    return int(folder.name)
            except (OSError, IndexError):
                continue
        time.sleep(0.05)
    raise AssertionError(f"no process of rank {rank}")
