"""The private losses and gradients of DP diffusion, against plain loops over single draws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from methods.tiny import TINY
from oracles.bookkeeper import compare
from scipy import stats
from torch import Tensor

from rapid.config.presets import build_settings
from rapid.dp.randomness import Randomness
from rapid.methods.dp_diffusion.audited import subjects
from rapid.methods.dp_diffusion.networks import build_denoiser, from_patches, to_patches, with_private_classes
from rapid.methods.dp_diffusion.objective import Draws, PrivateObjective
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.nn import Denoiser
from rapid.training.optimizers import select_trainable

SETTINGS = TINY["dp-diffusion"]["settings"] | TINY["dp-diffusion"]["public"]
VIEWS = ["private.views.shift=2", "private.views.flip=true"]


def tiny(*overrides: str) -> DpDiffusionSettings:
    return build_settings(DpDiffusionSettings, SETTINGS, overrides)


def objective_of(settings: DpDiffusionSettings) -> PrivateObjective:
    torch.manual_seed(0)
    return PrivateObjective(settings, build_denoiser(settings, 10).eval(), Randomness())


def rows(settings: DpDiffusionSettings, count: int) -> tuple[Tensor, Tensor]:
    colours = (3,) if settings.image.channels == 3 else ()
    generator = torch.Generator().manual_seed(1)
    size = settings.image.size
    images = torch.randint(0, 256, (count, size, size, *colours), dtype=torch.uint8, generator=generator)
    return images, torch.arange(count) % 10


def abar_of(settings: DpDiffusionSettings) -> np.ndarray:
    """The product of 1 - beta, with beta_1 = 1e-4 to beta_T = 0.02."""
    return np.concatenate([[1.0], np.cumprod(1 - np.linspace(1e-4, 0.02, settings.schedule.timesteps))])


def test_losses_are_those_of_algorithm_1() -> None:
    """Draw by draw: view by slices, x_t from the betas, the mean squared error of the noise over all pixels."""
    settings = tiny(*VIEWS, "private.label_dropout=0.5")
    objective, (images, labels) = objective_of(settings), rows(settings, 6)
    draws = objective.draw(6)._replace(dropped=torch.tensor([False, True, False, True, False, False]))
    classes = torch.where(draws.dropped, objective.denoiser.num_classes, labels)
    found = objective.losses(images, labels, draws)
    abar, patch = abar_of(settings), settings.denoiser.patch
    for row in range(6):
        pixels = images[row].numpy().astype(np.float64) / 127.5 - 1
        top, left, flip = draws.views[row, 2:5].tolist()
        y, x = int(top * 5), int(left * 5)
        crop = np.pad(pixels, 2, constant_values=-1)[y : y + 32, x : x + 32]
        view = torch.from_numpy((crop[:, ::-1] if flip <= 0.5 else crop).copy())[None, None].float()
        # noise in the layout of pixels
        eps = from_patches(draws.eps[row : row + 1], patch)
        a = abar[draws.t[row]]
        noisy = a**0.5 * view + (1 - a) ** 0.5 * eps
        predicted = objective.denoiser(to_patches(noisy.float(), patch), draws.t[row : row + 1], classes[row : row + 1])
        expected = (from_patches(predicted, patch) - eps).square().mean()
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)


def test_patches_are_the_same_pixels() -> None:
    images = torch.arange(2 * 3 * 8 * 8.0).view(2, 3, 8, 8)
    made = to_patches(images, 4)
    assert made.shape == (2, 48, 2, 2)
    assert sorted(made.flatten().tolist()) == images.flatten().tolist()
    assert torch.equal(made[0, :16, 1, 0], images[0, 0, 4:, :4].flatten())
    assert torch.equal(from_patches(made, 4), images)


def test_draws_are_independent_and_as_the_mixture_says() -> None:
    settings = tiny(
        "private.timesteps={weights: [0.1, 0.6, 0.3], breaks: [0, 100, 700, 1000]}",
        "image.size=8",
        "private.label_dropout=0.1",
    )
    draws = objective_of(settings).draw(40_000)
    parts = np.histogram(draws.t.numpy(), [1, 101, 701, 1001])[0]
    assert stats.chisquare(parts, [4000, 24_000, 12_000]).pvalue > 1e-5
    assert stats.kstest(draws.views.numpy().flatten(), "uniform").pvalue > 1e-5
    assert stats.kstest(draws.eps[:2000].numpy().flatten(), "norm").pvalue > 1e-5
    assert stats.binomtest(int(draws.dropped.sum()), 40_000, 0.1).pvalue > 1e-5
    # rows of one example, too: nothing is shared among them
    assert abs(np.corrcoef(draws.t[::2], draws.t[1::2])[0, 1]) < 0.03
    assert abs(np.corrcoef(draws.views[::2, 0], draws.views[1::2, 0])[0, 1]) < 0.03


@pytest.mark.parametrize(
    ("settings", "count", "draws"),
    [
        (tiny(*VIEWS), 3, 4),
        (tiny("denoiser.adaptive_norm=true", "image.channels=3", "private.views.rotate=9"), 4, 1),
        (tiny("denoiser.conditioning=cross-attention", *VIEWS), 2, 2),
    ],
    ids=["added", "adaptive", "cross-attention"],
)
def test_clipped_sums_of_the_real_network_are_a_loop_over_examples(
    settings: DpDiffusionSettings, count: int, draws: int
) -> None:
    """The mean over an example's views, timesteps and noises is clipped, not each of them."""
    objective, (images, labels) = objective_of(settings), rows(settings, count)
    images, labels = images.repeat_interleave(draws, 0), labels.repeat_interleave(draws)
    compare(objective.denoiser, fixed(objective, images, labels, count * draws), count, 0.5, 1e-3, draws)


def fixed(objective: PrivateObjective, images: Tensor, labels: Tensor, count: int) -> Callable[[slice], Tensor]:
    """Losses of rows whose draws stay the same."""
    drawn = objective.draw(count)
    return lambda rows: objective.losses(images[rows], labels[rows], Draws(*(part[rows] for part in drawn)))


def test_only_chosen_parameters_have_gradients() -> None:
    settings = tiny(*VIEWS)
    objective, (images, labels) = objective_of(settings), rows(settings, 2)
    select_trainable(objective.denoiser, ["unet.mid_block.*", "class_table.*"])
    compare(objective.denoiser, fixed(objective, images, labels, 2), 2, 0.5, 1e-3)
    trained = {name for name, p in objective.denoiser.named_parameters() if p.requires_grad}
    assert "class_table.weight" in trained
    assert {name.split(".")[1] for name in trained} == {"weight", "mid_block"}


@pytest.mark.parametrize("known", [0, 1, 13])
def test_new_classes_are_near_what_the_public_network_knows(known: int) -> None:
    settings = tiny()
    public = build_denoiser(settings, known)
    private = with_private_classes(public, 500)
    own, before = private.class_table.weight.detach(), public.class_table.weight.detach()
    assert torch.equal(own[-1], before[-1])
    assert len({tuple(row) for row in own.tolist()}) == 501
    centre, spread = (before[:-1].mean(0), before[:-1].std(0)) if known == 13 else (before[-1], torch.tensor(1.0))
    spread = spread if known else torch.tensor(0.1)
    assert float(((own[:-1].mean(0) - centre) / spread).abs().max()) < 5 / 500**0.5
    torch.testing.assert_close(own[:-1].std(0) / spread, torch.ones(own.shape[1]), rtol=0, atol=0.2)
    other = {name: p for name, p in private.named_parameters() if name != "class_table.weight"}
    assert all(torch.equal(p, dict(public.named_parameters())[name]) for name, p in other.items())


def test_adaptive_norm_scales_and_shifts() -> None:
    """Its layers of the embedding have twice the outputs; that is all that differs."""
    plain, adaptive = (build_denoiser(tiny(f"denoiser.adaptive_norm={on}"), 3) for on in ("false", "true"))
    shapes = [{name: p.shape for name, p in network.named_parameters()} for network in (plain, adaptive)]
    differing = {name for name in shapes[0] if shapes[0][name] != shapes[1][name]}
    assert shapes[0].keys() == shapes[1].keys()
    assert differing == {name for name in shapes[0] if ".time_emb_proj." in name}
    assert all(shapes[1][name][0] == 2 * shapes[0][name][0] for name in differing)
    stored = Denoiser(adaptive.config)
    stored.load_state_dict(adaptive.state_dict())


def test_canaries_of_an_audit_have_losses_that_can_be_repeated() -> None:
    subject, low = subjects(tiny(*VIEWS))
    indices = torch.tensor([3, 0, 15, 3])
    with torch.no_grad():
        first, second, every = (subject.losses(chosen) for chosen in (indices, indices, torch.arange(16)))
    assert torch.equal(first, second)
    torch.testing.assert_close(first[0], first[3])
    assert len({round(one, 6) for one in every.tolist()}) == 16
    assert low.autocast
