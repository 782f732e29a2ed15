"""The audit in a report: run on a model's networks, or read from `rapid audit --json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import rapid
from rapid.bundle import Bundle
from rapid.cli.audit import _record
from rapid.dp.audit import Audit, Finding, StepAudit
from rapid.errors import InputError
from rapid.methods import find_method
from rapid.methods.base import Inspectable
from rapid.release.audits import audit_rule, read_audit
from rapid.release.policy import AuditPolicy

GAME = Audit(
    claimed=2.0, delta=1e-5, bound=0.4, confidence=0.95, canaries=1000, guesses=10, right=6, steps=50,
    noise_multiplier=1.0, sample_rate=0.25, largest_refutable=4.6, seconds=1.0,
)  # fmt: skip


def findings(p_value: float = 0.3, detects: float = 0.02) -> tuple[Finding, ...]:
    return (
        Finding("late steps", "noise: scale", p_value, 1.0, detects),
        Finding("late steps, 64 examples", "noise: scale", 0.4, 1.0, detects / 2),
        Finding("late steps", "sensitivity: one example", 0.5, 1.0, detects),
        Finding("counts", "noise: scale", 0.6, 1.0, 0.9),
    )


def saved(path: Path, *, game: Audit = GAME, found: tuple[Finding, ...] = (), **changes: Any) -> Path:
    path.write_text(json.dumps(_record(game, StepAudit(found or findings(), 1.0)) | changes))
    return path


def test_what_rapid_audit_prints_is_read(tmp_path: Path) -> None:
    record = read_audit(saved(tmp_path / "audit.json"))
    assert (record["refuted"], record["tests"], record["subjects"]) == (False, 4, ["late steps", "counts"])
    assert record["detects"] == {"noise": 0.02, "sensitivity": 0.02}
    assert record["game"]["claimed"] == 2.0
    found = audit_rule(AuditPolicy(), record)
    assert found.outcome == "pass"
    assert "noise off by 2.0%" in found.found


@pytest.mark.parametrize("p_value", [1e-9, 0.0, math.nan])
def test_a_deviation_fails(tmp_path: Path, p_value: float) -> None:
    """Also if the file says otherwise."""
    record = read_audit(saved(tmp_path / "audit.json", found=findings(p_value), refuted=False))
    json.dumps(record, allow_nan=False)
    assert record["deviations"][0]["test"] == "noise: scale"
    assert audit_rule(AuditPolicy(required=False), record).stops


def test_correlated_noise_must_have_been_tested(tmp_path: Path) -> None:
    path = saved(tmp_path / "audit.json")
    with pytest.raises(InputError, match=r"did not test correlated noise; .* --set private\.noise_band=4"):
        read_audit(path, band=4)
    band = (*findings(), Finding("late steps, noise band 4", "noise: scale", 0.7, 1.0, 0.02))
    record = read_audit(saved(tmp_path / "band.json", found=band), band=4)
    assert (record["noise_multiplier"], record["sample_rate"]) == (1.0, 0.25)


def test_a_refuted_game_fails(tmp_path: Path) -> None:
    record = read_audit(saved(tmp_path / "audit.json", refuted=True))
    assert audit_rule(AuditPolicy(), record).outcome == "fail"


def test_blunt_tests_do_not_pass(tmp_path: Path) -> None:
    blunt = read_audit(saved(tmp_path / "blunt.json", found=findings(detects=0.2)))
    assert audit_rule(AuditPolicy(), blunt).outcome == "not measured"
    assert "too blunt" in audit_rule(AuditPolicy(), blunt).found
    assert audit_rule(AuditPolicy(max_undetected=0.2), blunt).outcome == "pass"
    # nothing is known about sensitivity
    none = read_audit(saved(tmp_path / "none.json", found=findings()[:2]))
    assert audit_rule(AuditPolicy(), none).outcome == "not measured"
    assert audit_rule(AuditPolicy(), None).stops


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rapid": "0.1.0"}, f"is of rapid 0.1.0, and this is {rapid.__version__}"),
        ({"step_tests": {}}, "not what rapid audit --json prints"),
        ({"step_tests": {"findings": [], "seconds": 1.0, "false_alarm": 0.001}}, "not what rapid audit --json prints"),
        ({"refuted": None}, "not what rapid audit --json prints"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        read_audit(saved(tmp_path / "audit.json", **changes))
    for text in ("", "[]", "{}", "\x00"):
        (tmp_path / "other").write_text(text)
        with pytest.raises(InputError):
            read_audit(tmp_path / "other")


def test_the_networks_of_a_private_bundle_can_be_audited(private: Bundle) -> None:
    """The tests of the steps themselves are in tests/dp."""
    method = find_method(private.config.method)
    assert isinstance(method, Inspectable)
    subjects = method.audited(private)
    assert [subject.name for subject in subjects] == [
        "late steps (rapid)", "late steps (rapid), bfloat16", "probe",
    ]  # fmt: skip
    from rapid.nn import Denoiser

    own = private.component("denoiser", Denoiser).state_dict()
    audited = subjects[0].network.state_dict()
    same = [name for name in own if own[name].shape == audited[name].shape and (own[name] == audited[name]).all()]
    assert len(same) >= len(own) - 1
