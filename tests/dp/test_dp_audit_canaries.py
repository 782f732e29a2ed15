"""The mask, the draws and the adversary of the audit of a whole private stage, against plain formulas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.data import ImageSet
from rapid.dp.access import PublicFacts
from rapid.dp.audit.adversary import Adversary
from rapid.dp.audit.canaries import CanaryAccess, CanaryDraws, canaries_among, canary_images
from rapid.dp.audit.findings import FALSE_ALARM, StepAudit
from rapid.dp.audit.power import off_by
from rapid.dp.budget import Budget
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.randomness import Randomness
from rapid.dp.releases import DpSgdSpec, QuerySpec, Release
from rapid.errors import InputError, RapidError
from rapid.training import RunFolder, Trainer
from rapid.training.optimizers import noisy_schedule

CPU = torch.device("cpu")
COUNT, SIDE = 24, 4
NOISELESS = 1e-9
RARE = 1e-7
"""False alarms of mechanisms that are right: these tests run often."""


class Noiseless(CanaryAccess):
    """Claims its budget, and adds almost no noise."""

    def _listed(self, name: str, kind: str) -> Release:
        return super()._listed(name, kind).model_copy(update={"noise_multiplier": NOISELESS})


def opened(
    folder: Path, coins: np.ndarray, access: type[CanaryAccess] = CanaryAccess, steps: int = 1, batch: int = COUNT
) -> CanaryAccess:
    images = canary_images(COUNT, SIDE, 1)
    specs = [
        DpSgdSpec(name="net", dataset_size=COUNT, expected_batch=batch, steps=steps, clip_norm=1.0, multiplicity=2),
        QuerySpec(name="bright", kind="count", dataset_size=COUNT),
        QuerySpec(name="pixels", kind="mean", sensitivity=3.0, dataset_size=COUNT),
        QuerySpec(name="shades", kind="histogram", dataset_size=COUNT),
    ]
    releases = tuple(Release(spec=spec, noise_multiplier=2.0) for spec in specs)
    budget = Budget(epsilon=1.0, delta=1e-5, dataset_size=COUNT, releases=releases)
    return access(images, PublicFacts.of(images), budget, RunFolder(folder), device=CPU, coins=coins)


def flat(images: Tensor) -> Tensor:
    return images.flatten(1).float() / 255


def trained(access: CanaryAccess, draws: Randomness | None = None, gain: float = 1.0) -> Tensor:
    """The weights' movement by one step of size 1 from zero: minus the mean gradient.

    With `draws`, the images are shown with noise.
    """
    network = nn.Linear(SIDE * SIDE, COUNT, bias=False)
    nn.init.zeros_(network.weight)

    def losses(images: Tensor, labels: Tensor) -> Tensor:
        rows = flat(images)
        if draws is not None:
            rows = rows + draws.normal(rows.numel()).view_as(rows) + draws.uniform(len(rows)).float()[:, None]
        return gain * F.cross_entropy(network(rows), labels, reduction="none")

    steps = access.budget.release("net").spec.steps
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    trainer = Trainer(network, optimizer, noisy_schedule(optimizer, steps))
    access.train("net", trainer, losses, [access.images, access.labels])
    return network.weight.detach()


@pytest.mark.parametrize("kind", ["none", "some"])
def test_only_those_who_take_part_contribute(tmp_path: Path, kind: str) -> None:
    """With almost no noise, every release is the sum over those whose coin says so; N stays as it is."""
    coins = np.zeros(COUNT, dtype=bool) if kind == "none" else np.arange(COUNT) % 3 == 0
    access = opened(tmp_path, coins, Noiseless)
    images = access.images._rows.numpy()
    pixels = torch.from_numpy(images.reshape(COUNT, -1)[coins]).double() / 255
    bright = images.mean((1, 2))[coins] > 127
    assert access.count("bright", lambda x: flat(x).mean(1) > 127 / 255, access.images) == bright.sum()
    norms = pixels.norm(dim=1, keepdim=True)
    expected = (pixels * (3 / norms).clamp(max=1)).sum(0) / COUNT
    torch.testing.assert_close(access.mean("pixels", flat, access.images), expected, rtol=1e-5, atol=1e-5)
    shades = access.histogram("shades", 4, lambda x: x.flatten(1)[:, 0].long() // 64, access.images)
    assert shades.tolist() == np.bincount(images[coins, 0, 0] // 64, minlength=4).tolist()
    # the gradient of the cross-entropy at zero weights: (1 / m - [own class]) x, clipped to 1
    errors = 1 / COUNT - torch.eye(COUNT)[torch.from_numpy(np.flatnonzero(coins))].double()
    gradients = errors[:, :, None] * pixels[:, None]
    length = gradients.flatten(1).norm(dim=1).view(-1, 1, 1)
    moved = -(gradients * (1 / length).clamp(max=1)).sum(0) / COUNT
    torch.testing.assert_close(trained(access).double(), moved, rtol=1e-2, atol=1e-5)


def test_a_loss_that_is_no_number_is_masked_too(tmp_path: Path) -> None:
    access = opened(tmp_path, np.zeros(COUNT, dtype=bool), Noiseless)
    mean = access.mean("pixels", lambda x: flat(x) + torch.inf, access.images)
    assert mean.abs().max() < 1e-6


def test_without_noise_every_coin_is_seen_and_nothing_is_left(tmp_path: Path) -> None:
    """What the auditor subtracts is what was released, draws included; and the adversary guesses all coins."""
    coins = np.random.default_rng(0).random(COUNT) < 0.5
    access = opened(tmp_path, coins, Noiseless, steps=2)
    trained(access, access.draws)
    for scores in (access.adversary.white_box, access.adversary.black_box):
        assert scores[torch.from_numpy(coins)].min() > scores[torch.from_numpy(~coins)].max()
    (evidence,) = access.evidence
    assert torch.stack(evidence.noise).norm(dim=1).max() < 1e-4
    assert evidence.there.count == 2 * coins.sum()
    assert evidence.there.shift == pytest.approx(evidence.there.reach, rel=0.01)


def test_draws_of_another_source_cannot_be_audited(tmp_path: Path) -> None:
    access = opened(tmp_path, np.ones(COUNT, dtype=bool))
    with pytest.raises(RapidError, match=r"'net' cannot be audited: .*PrivateAccess.draws"):
        trained(access, Randomness())


def test_draws_belong_to_a_canary_and_a_step() -> None:
    draws = CanaryDraws()
    draws.belong_to([(3, 0, 0), (5, 0, 1)])
    t, eps = draws.uniform(2), draws.normal(2 * 40_000).view(2, -1)
    draws.belong_to([(5, 0, 1)])
    assert torch.equal(draws.uniform(1), t[1:])
    assert torch.equal(draws.normal(40_000), eps[1])
    assert kstest(eps[0].numpy(), "norm").pvalue > 1e-6
    assert abs(np.corrcoef(eps)[0, 1]) < 0.03
    for others in [(3, 1, 0)], [(3, 0, 1)], [(4, 0, 0)]:
        draws.belong_to(others)
        assert float(draws.uniform(1)) != float(t[0])
    draws.belong_to([(0, 0, 0), (1, 0, 0), (2, 0, 0)])
    with pytest.raises(RapidError, match="4 draws for 3 rows"):
        draws.uniform(4)
    draws.belong_to(())
    uniform = draws.uniform(40_000)
    assert uniform.min() > 0
    assert kstest(uniform.numpy(), "uniform").pvalue > 1e-6


class SameNoise(PrivateMechanism):
    """The stream of random bytes starts anew in each step."""

    def _add_noise(self, total: Tensor) -> None:
        generator = np.random.default_rng(0)
        self._randomness = Randomness(generator.bytes)
        super()._add_noise(total)
        self._randomness = Randomness()


class OneMore(PrivateMechanism):
    """The first canary is in every batch."""

    def _draw_batch(self) -> Tensor:
        return torch.cat([super()._draw_batch(), torch.zeros(1, dtype=torch.int64)]).unique()


class Remembers(PrivateMechanism):
    """Adds the batch before to each batch."""

    def _clipped_sum(self, indices: Tensor) -> Tensor:
        now = super()._clipped_sum(indices)
        earlier, self.earlier = getattr(self, "earlier", torch.zeros_like(now)), now
        return now + 12 * earlier


def alarms(access: CanaryAccess, false_alarm: float = FALSE_ALARM) -> set[str]:
    (evidence,) = access.evidence
    return {finding.test for finding in StepAudit(tuple(evidence.findings()), 0.0, false_alarm).deviations}


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (off_by(), ""),
        (off_by(noise=0.1), "noise: scale"),
        (off_by(noise=0.5), "noise: scale"),
        (off_by(sensitivity=4.0), "sensitivity: canaries that take part"),
        (off_by(rate=2.0), "sampling: rate"),
        (SameNoise, "noise: nothing repeats from step to step"),
        (OneMore, "sampling: rate of each example"),
        (Remembers, "nothing of canaries that are absent or not in the batch"),
    ],
)
def test_what_is_broken_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: Callable[..., Any], test: str
) -> None:
    """A training of the real access, with another mechanism in it."""
    monkeypatch.setattr("rapid.dp.access.PrivateMechanism", broken)
    access = opened(tmp_path, np.arange(COUNT) % 4 > 0, steps=16, batch=COUNT // 3)
    trained(access, access.draws, gain=1e4)
    if test:
        assert test in alarms(access)
    else:
        assert alarms(access, RARE) == set()


def test_scores_are_log_likelihood_ratios() -> None:
    """Of orthogonal contributions in full batches with much noise: d (y - d / 2) / s^2, but for a constant."""
    torch.manual_seed(0)
    rows, deviation = torch.eye(50, 1000), 4.0
    total = torch.randn(1000, dtype=torch.float64) * deviation + rows[::2].sum(0)
    adversary = Adversary(50)
    adversary.add_step(rows, total, deviation, 1.0)
    exact = total[:50] / deviation**2
    slope = np.polyfit(exact.numpy(), adversary.white_box.numpy(), 1)[0]
    assert slope == pytest.approx(1, abs=0.35)
    assert np.corrcoef(exact, adversary.white_box)[0, 1] > 0.999


def test_contributions_of_nothing_tell_nothing() -> None:
    adversary = Adversary(5)
    adversary.add_result(torch.zeros(5, 3), torch.ones(3, dtype=torch.float64), 1.0)
    assert adversary.white_box.tolist() == [0.0] * 5
    adversary.add_losses(torch.zeros(5, dtype=torch.float64))
    assert adversary.black_box.tolist() == [0.0] * 5


def test_canaries_are_of_one_class_each() -> None:
    for channels, shape in ((1, (30, 8, 8)), (3, (30, 8, 8, 3))):
        images = canary_images(30, 8, channels)
        assert images.images.shape == shape
        assert images.labels is not None
        assert len(set(images.labels.tolist())) == len(images.classes) == 30
        assert images.declared
        centred = images.images.reshape(30, -1) - 127.5
        assert np.abs(np.corrcoef(centred) - np.eye(30)).max() < 0.6


def test_canaries_of_a_set_are_drawn_with_their_labels() -> None:
    pixels = np.arange(50, dtype=np.uint8)[:, None, None] * np.ones((1, 4, 4), np.uint8)
    images = ImageSet(pixels, np.arange(50) % 3, ("a", "b", "c"), "set")
    chosen = canaries_among(images, 40)
    numbers = chosen.images[:, 0, 0].astype(int)
    assert len(set(numbers.tolist())) == 40
    assert chosen.labels is not None
    assert (chosen.labels == numbers % 3).all()
    assert numbers.tolist() != sorted(numbers.tolist())
    with pytest.raises(InputError, match="has only 50"):
        canaries_among(images, 51)
