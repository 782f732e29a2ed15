"""The audit of a whole private stage: the true one passes, and stages that are broken on purpose do not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rapid.dp.audit.findings import StepAudit
from rapid.dp.audit.power import off_by
from rapid.errors import InputError
from rapid.methods import apply_overrides
from rapid.methods.rapid.settings import RapidSettings
from rapid.stages.audited import StageAudit, audit_stage

RARE = 1e-7
"""False alarms of a stage that is right: these tests run often."""
CANARIES, STEPS = 40, 3
CLAIM = 4.0


@pytest.fixture(scope="module")
def settings(tiny_settings: RapidSettings) -> RapidSettings:
    sizes = [f"private.steps={STEPS}", f"private.probe.steps={STEPS}", "private.expected_batch=10"]
    found = apply_overrides(tiny_settings.model_dump(mode="json"), sizes)
    assert isinstance(found, RapidSettings)
    return found


def play(base: Path, settings: RapidSettings, **changes: Any) -> StageAudit:
    arguments = {"epsilon": CLAIM, "delta": 1e-5, "canaries": CANARIES, "confidence": 1 - 1e-6, **changes}
    return audit_stage(base, settings, **arguments)


def test_the_true_stage_passes(public_bundle: Path, settings: RapidSettings) -> None:
    ledger = Path(os.environ["RAPID_LEDGER"])
    before = ledger.read_bytes() if ledger.exists() else b""
    found = play(public_bundle, settings)
    assert (ledger.read_bytes() if ledger.exists() else b"") == before
    assert found.releases == ("overlap", "probe", "denoiser")
    assert found.counts == ("overlap",)
    assert StepAudit(found.tests.findings, 0.0, RARE).deviations == []
    assert {"probe", "denoiser", "ledger", "statement"} == {finding.subject for finding in found.tests.findings}
    assert found.bound <= CLAIM
    # three steps of forty canaries: noise is seen sharply, and sensitivity hardly
    for power in found.power.values():
        assert power.noise < 0.1
        assert power.sensitivity is not None
        assert power.sensitivity > 0.5
    assert found.power["probe"].rate is None
    assert not found.conclusive
    assert found.canaries_needed is None or found.canaries_needed > CANARIES


def test_half_of_the_noise_is_found(
    public_bundle: Path, settings: RapidSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all trainings of the stage, however much the claim allows."""
    monkeypatch.setattr("rapid.dp.access.PrivateMechanism", off_by(noise=0.5))
    found = play(public_bundle, settings)
    assert found.tests.refuted
    assert found.refuted
    scales = {f.subject: f for f in found.tests.deviations if f.test == "noise: scale"}
    assert {name: f.observed for name, f in scales.items()} == pytest.approx({"probe": 0.5, "denoiser": 0.5}, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"canaries": 10}, "canaries 10"), ({"confidence": 1.0}, "confidence 1.0"), ({"epsilon": -1.0}, "epsilon -1.0")],
)
def test_bad_arguments(public_bundle: Path, settings: RapidSettings, changes: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=words):
        play(public_bundle, settings, **changes)


def test_correlated_noise_is_refused(public_bundle: Path, settings: RapidSettings) -> None:
    """The tests are those of independent noise: a run that is right would look wrong."""
    band = apply_overrides(settings.model_dump(mode="json"), ["private.noise_band=2"])
    assert isinstance(band, RapidSettings)
    with pytest.raises(InputError, match=r"private\.noise_band 2: must be 1 with --end-to-end"):
        play(public_bundle, band)


def test_a_base_is_needed(settings: RapidSettings) -> None:
    with pytest.raises(InputError, match="needs a public bundle"):
        audit_stage(None, settings, epsilon=1.0, delta=1e-5)
