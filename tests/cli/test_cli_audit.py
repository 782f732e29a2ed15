"""`rapid audit` on the command line: its options, its words and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rapid.bundle import Bundle, BundleConfig, write_bundle
from rapid.cli import main
from rapid.config.sections import ImageSettings
from rapid.dp.audit.findings import deviations_needed
from rapid.dp.audit.guesses import largest_refutable
from rapid.dp.audit.power import off_by
from rapid.nn import Denoiser
from rapid.training.optimizers import select_trainable

OTHER = BundleConfig(kind="public", method="dpdm", settings={}, image=ImageSettings(), classes=(), public=None)
"""Of a public bundle of another method than rapid."""
TRAINED = "unet.up_blocks*"
"""Fewer layers are quicker to audit."""
GAME = ["audit", "--canaries", "100", "--steps", "2", "--sample-rate", "1", "--set", "private.physical_batch=64",
        "--set", f"private.trainable=['{TRAINED}']"]  # fmt: skip
STAGE = ["audit", "--end-to-end", "--canaries", "40", "--steps", "3", "--sample-rate", "0.25"]


def test_the_networks_of_a_base_are_audited_and_too_few_canaries_are_no_pass(
    public_bundle: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The game cannot refute so large a claim: with --require-conclusive this is a failure."""
    command = [*GAME, "--base", str(public_bundle), "--epsilon", "6", "--json"]
    assert main([*command, "--require-conclusive"]) == 1
    printed = capfd.readouterr()
    assert "rapid: inconclusive: the game with 100 canaries could not have refuted epsilon 6" in printed.err
    record = json.loads(printed.out)
    assert not record["conclusive"]
    assert not record["refuted"]
    assert record["largest_refutable"] == pytest.approx(largest_refutable(100, 1e-5, 0.95))
    # the power of the test of scale tells how many numbers were looked at: those of this base's denoiser
    network = Bundle.open(public_bundle, "base").component("denoiser", Denoiser).with_classes(10)
    select_trainable(network, (TRAINED,))
    size = sum(p.numel() for p in network.parameters() if p.requires_grad)
    scale = next(
        one
        for one in record["step_tests"]["findings"]
        if (one["subject"], one["test"]) == ("late steps (rapid), no examples", "noise: scale")
    )
    steps = min(128, max(12, -(-(1 << 16) // size)))
    assert scale["detects"] == pytest.approx(deviations_needed() / (2 * steps * size) ** 0.5)


def test_the_whole_stage_says_what_its_size_can_refute(public_bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    command = [*STAGE, "--base", str(public_bundle), "--epsilon", "0.5", "--confidence", "0.9999"]
    assert main([*command, "--require-conclusive"]) == 1
    printed = capfd.readouterr()
    assert "rapid: inconclusive: if all noise were half of what is claimed, 40 canaries would show" in printed.err
    assert "NOT CONCLUSIVE" in printed.out
    assert "claimed:  epsilon 0.5 at delta 1e-05, by rapid: overlap, probe, denoiser" in printed.out
    assert "no deviation found" in printed.out
    assert "with 95% power it finds" in printed.out
    assert "of the count 'overlap' only the guesses say something" in printed.out


def test_a_stage_with_too_little_noise_is_refuted(
    tmp_path: Path, public_bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On images of a set; --set has the last word on the sizes."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 32, 32), np.uint8)
    np.savez(tmp_path / "set.npz", images=images, labels=np.arange(50) % 2, classes=np.array(["a", "b"]))
    monkeypatch.setattr("rapid.dp.access.PrivateMechanism", off_by(noise=0.1))
    more = ["--images", str(tmp_path / "set.npz"), "--set", "private.steps=4", "--json"]
    assert main([*STAGE, "--base", str(public_bundle), "--epsilon", "10", *more]) == 3
    printed = capfd.readouterr()
    assert "rapid: the claim is refuted" in printed.err
    record = json.loads(printed.out)
    assert record["refuted"]
    assert record["tests"]["refuted"]
    assert record["gaussian"] > 10
    steps = [one["observed"] for one in record["tests"]["findings"] if one["test"] == "steps: as many as planned"]
    assert steps == [3, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--end-to-end", "--base"),
        ("--end-to-end --base {private}", "expected a public one"),
        ("--end-to-end --base {public} --method nonsense", "--method nonsense"),
        ("--end-to-end --base {public} --canaries 19", "--canaries 19"),
        ("--end-to-end --base {public} --steps 1", "--steps 1"),
        ("--end-to-end --base {public} --sample-rate 0", "--sample-rate 0"),
        ("--end-to-end --base {public} --confidence 1", "--confidence 1"),
        ("--end-to-end --base {public} --delta 2", "--delta 2"),
        ("--end-to-end --base {public} --images {digits}/none", "--images"),
        ("--end-to-end --base {public} --images {digits}", "--canaries 200: --images has only 100"),
        ("--end-to-end --base {public} --set retrieval.k=900", "the public bundle"),
        ("--images {digits}", "--images"),
        ("--method rapid", "--method rapid"),
        ("--base {private}", "expected a public one"),
        ("--base {other}", "was made for dpdm, and a denoiser of rapid would be trained; add --end-to-end"),
        ("--preset dpdm-mnist", "is for dpdm, and a denoiser of rapid would be trained; add --end-to-end"),
        ("--canaries 19", "--canaries 19"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str,
    words: str,
    public_bundle: Path,
    private_bundle: Path,
    digits: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    other = write_bundle(tmp_path / "other", OTHER, {}, card="").path
    places = {"public": public_bundle, "private": private_bundle, "digits": digits, "other": other}
    assert main(["audit", "--epsilon", "1", *(part.format(**places) for part in arguments.split())]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rapid: ")]
    assert len(lines) == 1
    assert words in lines[0]
