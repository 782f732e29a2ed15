"""The tests of the steps: the true mechanism passes, and mechanisms that are broken on purpose do not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rapid.dp import PrivateAccess, PrivateMechanism
from rapid.dp.audit import StepAudit, Subject, audit_steps
from rapid.dp.audit.bench import EveryRule
from rapid.dp.audit.findings import FALSE_ALARM
from rapid.dp.audit.queries import query_findings
from rapid.dp.audit.sampling import sampling_findings
from rapid.dp.audit.steps import subject_findings
from rapid.dp.gradients.registry import RULES
from rapid.dp.releases import DpSgdSpec
from rapid.methods import load_settings
from rapid.methods.rapid.audited import late_steps, probe_head
from rapid.methods.rapid.settings import RapidSettings

NOISE = 3.0


RARE = 1e-7
"""False alarms of mechanisms that are right: these tests run often."""


def refuted(findings: list[Any], false_alarm: float = FALSE_ALARM) -> list[str]:
    """Tests that raise an alarm, at the level of the whole audit."""
    return [finding.test for finding in StepAudit(tuple(findings), 0.0, false_alarm).deviations]


@pytest.fixture(scope="module")
def small() -> Subject:
    """A small network with several kinds of layers."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 32), nn.LayerNorm(32), nn.SiLU(), nn.Linear(32, 24))
    x = torch.randn(16, 6)
    return Subject("small", network, lambda indices: network(x[indices]).square().sum(1), 16, 0.5)


def test_the_true_mechanism_passes(small: Subject) -> None:
    found = audit_steps([small], noise_multiplier=NOISE, sample_rate=0.25)
    assert refuted(list(found.findings), RARE) == []
    assert {"small", "every layer rule", "sampling", "queries"} <= {finding.subject for finding in found.findings}
    main = [f.detects for f in found.findings if f.test == "noise: scale" and f.subject == "small, no examples"]
    assert main[0] is not None
    assert main[0] < 0.1


def test_every_built_in_rule_is_audited() -> None:
    assert {kind for kind in RULES if kind.__module__.startswith("torch.")} <= {type(m) for m in EveryRule().modules()}


@pytest.mark.parametrize("overrides", [[], ["private.objective=late", "denoiser.conditioning=cross-attention"]])
def test_the_network_of_the_method_passes(overrides: list[str]) -> None:
    settings = load_settings("demo", ["denoiser.channels=8", "denoiser.heads=2", *overrides])
    assert isinstance(settings, RapidSettings)
    late = late_steps(settings)
    for subject in (late, late.with_autocast()) if not overrides else (late,):
        assert refuted(subject_findings(subject, NOISE), RARE) == []


def test_the_probe_passes(tiny_settings: RapidSettings) -> None:
    assert refuted(subject_findings(probe_head(tiny_settings), NOISE), RARE) == []


class _Broken(PrivateMechanism):
    """Sums and noise are the true ones, but for what a subclass changes."""

    def _plan(self, **changes: float) -> DpSgdSpec:
        spec = self._spec
        assert isinstance(spec, DpSgdSpec)
        return spec.model_copy(update=changes)


class LessNoise(_Broken):
    """A tenth too little, whatever the mechanism does with its release."""

    def __init__(self, release: Any, *arguments: Any, **options: Any) -> None:
        less = release.model_copy(update={"noise_multiplier": 0.9 * release.noise_multiplier})
        super().__init__(less, *arguments, **options)


class NoNoise(_Broken):
    def __init__(self, release: Any, *arguments: Any, **options: Any) -> None:
        less = release.model_copy(update={"noise_multiplier": 1e-6 * release.noise_multiplier})
        super().__init__(less, *arguments, **options)


class LargerClip(_Broken):
    """Gradients of norms up to a tenth above the clip norm."""

    def _clipped_sum(self, indices: Tensor) -> Tensor:
        spec = self._spec
        self._spec = self._plan(clip_norm=1.1 * spec.clip_norm)
        try:
            return super()._clipped_sum(indices)
        finally:
            self._spec = spec


class NoClip(_Broken):
    def _clipped_sum(self, indices: Tensor) -> Tensor:
        spec = self._spec
        self._spec = self._plan(clip_norm=1e9)
        try:
            return super()._clipped_sum(indices)
        finally:
            self._spec = spec


class _OnGradient(_Broken):
    """Changes what is returned."""

    def gradient(self) -> list[Tensor]:
        found = super().gradient()
        whole = self.changed(torch.cat([part.flatten() for part in found]))
        pieces = whole.split([part.numel() for part in found])
        return [piece.view_as(part) for piece, part in zip(pieces, found, strict=True)]

    def changed(self, whole: Tensor) -> Tensor:
        raise NotImplementedError


class RepeatedNoise(_OnGradient):
    """Every step but the first returns the first."""

    def changed(self, whole: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.first = whole
        return self.first


class CommonNoise(_OnGradient):
    """Noise of the right variance, half of which is the same in every step."""

    def changed(self, whole: Tensor) -> Tensor:
        spec = self._spec
        assert isinstance(spec, DpSgdSpec)
        own = self.release.noise_stddev / spec.expected_batch
        if not hasattr(self, "common"):
            self.common = torch.randn(whole.shape) * own
        return (whole + self.common) / 2**0.5


class OneLayerWithoutNoise(_OnGradient):
    """As if a part of the parameters were forgotten."""

    def changed(self, whole: Tensor) -> Tensor:
        whole[-24:] = whole[-24:].round()
        return whole


class MoreSteps(_Broken):
    """Never refuses."""

    def gradient(self) -> list[Tensor]:
        self._steps_taken = min(self._steps_taken, self._spec.steps - 1)
        return super().gradient()


class HigherRate(_Broken):
    """Examples are in a batch a tenth too often."""

    def _draw_batch(self) -> Tensor:
        return (self._randomness.uniform(self._examples) <= 1.1 * self._spec.sample_rate).nonzero().flatten()


@pytest.mark.parametrize(
    ("broken", "tests"),
    [
        (LessNoise, {"noise: scale"}),
        (NoNoise, {"noise: scale"}),
        (
            LargerClip,
            {
                "sensitivity: one example",
                "sensitivity: many identical examples",
                "sensitivity: each layer alone",
            },
        ),
        (NoClip, {"sensitivity: one example", "sensitivity: extreme losses"}),
        (RepeatedNoise, {"noise: nothing repeats from step to step"}),
        (CommonNoise, {"noise: nothing repeats from step to step"}),
        (OneLayerWithoutNoise, {"noise: scale of each parameter and step"}),
        (MoreSteps, {"steps: no more than planned"}),
    ],
)
def test_broken_mechanisms_are_found(small: Subject, broken: type[PrivateMechanism], tests: set[str]) -> None:
    assert tests <= set(refuted(subject_findings(small, NOISE, broken)))


def test_noise_that_is_drawn_again_after_resuming_is_found(small: Subject) -> None:
    memory: dict[int, Tensor] = {}

    class Again(_OnGradient):
        """A resumed run begins with the noise of the first silent steps, which come after 24 others."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.skipped = options["steps_taken"] - 24 if options["steps_taken"] else 0

        def changed(self, whole: Tensor) -> Tensor:
            if self.release.noise_multiplier != NOISE:
                return whole
            return memory.setdefault(self.steps_taken - self.skipped, whole)

    found = subject_findings(small, NOISE, Again)
    # which of the two sees it depends on the signs
    repeats = {"noise: nothing repeats from step to step", "noise: independent steps"}
    assert repeats & set(refuted([f for f in found if "resumed" in f.subject]))


def test_a_higher_rate_is_found() -> None:
    assert "sampling: rate" in refuted(sampling_findings(0.25, HigherRate))
    assert refuted(sampling_findings(1.0, PrivateMechanism), RARE) == []


class QuietAccess(PrivateAccess):
    """Queries with a tenth too little noise."""

    def __init__(self, images: Any, facts: Any, budget: Any, *arguments: Any, **options: Any) -> None:
        less = tuple(r.model_copy(update={"noise_multiplier": 0.9 * r.noise_multiplier}) for r in budget.releases)
        super().__init__(images, facts, budget.model_copy(update={"releases": less}), *arguments, **options)


class UnboundedMean(PrivateAccess):
    """Means of features whose bound is a tenth too large."""

    def mean(self, name: str, features: Any, *tensors: Any) -> Tensor:
        return super().mean(name, features, *tensors) * 1.1


def test_broken_queries_are_found() -> None:
    assert refuted(query_findings(), RARE) == []
    assert "noise: scale" in refuted(query_findings(QuietAccess))
    assert "sensitivity: mean" in refuted(query_findings(UnboundedMean))


PROGRAM = """
import sys
import torch
from torch import nn
from rapid.dp import PrivateMechanism, Ranks
from rapid.dp.audit import StepAudit, Subject
from rapid.dp.audit.sampling import sampling_findings
from rapid.dp.audit.steps import subject_findings

class Twice(PrivateMechanism):
    '''Each rank adds all of the noise.'''
    def gradient(self):
        found = super().gradient()
        noise = [torch.randn_like(part) * self.release.noise_stddev / self._spec.expected_batch for part in found]
        for part in noise:
            self._ranks.all_reduce(part)
        return [part + more for part, more in zip(found, noise)]

with Ranks.join(torch.device("cpu")) as ranks:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 20))
    x = torch.randn(17, 5)
    subject = Subject("ranks", network, lambda indices: network(x[indices]).square().sum(1), 17, 0.5)
    found = subject_findings(subject, 3.0, PrivateMechanism, ranks) + sampling_findings(0.3, PrivateMechanism, ranks)
    broken = subject_findings(subject, 3.0, Twice, ranks)
    with open(f"{sys.argv[1]}/{ranks.rank}", "w") as out:
        for findings in (found, broken):
            print(sorted({one.test for one in StepAudit(tuple(findings), 0.0).deviations}), file=out)
"""


def test_two_ranks_pass_and_noise_of_each_does_not(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    done = subprocess.run(
        [sys.executable, *launcher, str(tmp_path / "program.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        true, broken = (tmp_path / f"{rank}").read_text().splitlines()
        assert true == "[]"
        assert "noise: scale" in broken
