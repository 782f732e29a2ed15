"""What rounding does to norms and sums: an example never changes a sum by more than clip_norm."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles.bookkeeper import forms_chosen
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.dp.gradients import ROUNDING_MARGIN, BookKeeper
from rapid.dp.gradients.forms import SQUARED, Direct, Factors, Gradient, MatrixGhost, RowsGhost
from rapid.dp.mechanism import PrivateMechanism
from rapid.dp.releases import DpSgdSpec, QuerySpec, Release
from rapid.methods import load_settings
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser

CLIP_NORM = 0.1


@pytest.mark.parametrize(("count", "width", "spread"), [(60_000, 64, 0.3), (3_000_000, 4, 0.01), (3_000_000, 4, 1.0)])
def test_one_of_millions_moves_a_sum_over_all_by_at_most_clip_norm(count: int, width: int, spread: float) -> None:
    """The linear layer of a probe, whose gradients all point about the same way; float32 sums are off by a third."""
    generator = torch.Generator().manual_seed(7)
    x = torch.zeros(count, width)
    x[:, 0] = 1
    x = F.pad(F.normalize(x + spread * torch.randn(count, width, generator=generator), dim=1), (0, 1), value=0.3)
    head = nn.Linear(width + 1, 10, bias=False)
    nn.init.zeros_(head.weight)
    spec = DpSgdSpec(name="head", dataset_size=count, expected_batch=count, steps=1, clip_norm=CLIP_NORM)
    mechanism = PrivateMechanism(
        Release(spec=spec, noise_multiplier=1.0),
        head,
        lambda i: F.cross_entropy(head(x[i]), torch.zeros(len(i), dtype=torch.int64), reduction="none"),
        physical_batch=1 << 17,
    )
    everyone = torch.arange(count)
    whole = mechanism._clipped_sum(everyone)
    for left_out in (0, count // 3, count - 1):
        less = mechanism._clipped_sum(torch.cat([everyone[:left_out], everyone[left_out + 1 :]]))
        change = float((whole - less).norm())
        assert CLIP_NORM / (1 + 2 * ROUNDING_MARGIN) < change < CLIP_NORM / (1 + ROUNDING_MARGIN / 2)


@pytest.mark.parametrize("value", [1.0000001, 1.1, 0.3, 1 / 3, 1.9])
def test_norms_of_ten_million_elements(value: float) -> None:
    """A single sum in float32 is too small by a third of a percent; the norm is a bound, and no loose one."""
    gradient = torch.full((1, 10_000_000), value)
    norm = math.sqrt(gradient.numel()) * float(gradient[0, 0].double())
    found = Direct(gradient).norms_squared().sqrt()
    assert norm <= float(found) <= norm * (1 + SQUARED * torch.finfo(torch.float32).eps)
    clipped = Factors(found, norm / 10).combine(gradient).norm()
    assert float(clipped) == pytest.approx(norm / 10 / (1 + ROUNDING_MARGIN), rel=2e-5)
    assert float(clipped) < norm / 10 / (1 + ROUNDING_MARGIN / 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_have_at_least_the_precision_of_float32(dtype: torch.dtype) -> None:
    gradients = torch.randn(100, 33, generator=torch.Generator().manual_seed(0)).to(dtype)
    direct = Direct(gradients.clone())
    norms = direct.norms_squared().sqrt()
    exact = gradients.double()
    torch.testing.assert_close(norms, exact.norm(dim=1), rtol=1e-5, atol=0)
    weights = (3.0 / (norms * (1 + ROUNDING_MARGIN))).clamp(max=1)
    torch.testing.assert_close(direct.weighted_sum(Factors(norms, 3.0)), weights @ exact, rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 700), st.floats(-40, 38), st.integers(0, 2**31))
def test_norms_of_gradients_are_bounds_at_any_scale(width: int, scale: float, seed: int) -> None:
    """Squares of tiny numbers vanish in float32, and those of huge ones are infinite: such an example counts as 0."""
    gradient = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) * 10.0**scale
    norm, found = float(gradient.double().norm()), float(Direct(gradient).norms_squared().sqrt())
    assert not found < norm
    if math.isfinite(norm) and norm < 1e19:
        # far below the smallest clip_norm
        assert found <= norm * (1 + SQUARED * torch.finfo(torch.float32).eps) + 1e-16


@settings(max_examples=80, deadline=None)
@given(
    convolution=st.booleans(), activations=st.integers(-30, -15), loss=st.integers(10, 19), seed=st.integers(0, 2**31)
)
@example(convolution=False, activations=-23, loss=17, seed=0)
def test_norms_are_bounds_where_products_of_floats_vanish(
    convolution: bool, activations: int, loss: int, seed: int
) -> None:
    """Squares of tiny activations are lost in float32, but large gradients of the outputs make up for them."""
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Conv2d(8, 8, 2, bias=False) if convolution else nn.Linear(64, 64, bias=False)
    x = torch.randn((1, 8, 3, 3) if convolution else (1, 2, 64), generator=generator) * 10.0**activations
    weights = torch.randn(layer(x).shape, generator=generator)

    def losses() -> Tensor:
        return (layer(x) * weights * 10.0**loss).flatten(1).sum(1)

    with forms_chosen("ghost"):
        sums, norms = BookKeeper(layer).clipped_sum(losses, 1, 1e-8)
    layer, x, weights = layer.double(), x.double(), weights.double()
    (exact,) = torch.autograd.grad(losses().sum(), layer.weight)
    # where squares overflow there is no norm, and the example counts as 0
    assert not float(norms) < float(exact.norm()) * (1 - 1e-5)
    assert float(sums[0].double().norm()) <= 1e-8


def nearly_constant(positions: int, features: int, value: float, spread: float, generator: torch.Generator) -> Tensor:
    """Rows of one number, of which every second one varies a little: errors of their products have one sign."""
    rows = torch.full((1, positions, features), value)
    rows[:, 1::2] *= 1 + spread * torch.randn(1, positions // 2, features, generator=generator)
    return rows


def opposite(positions: int, features: int, generator: torch.Generator) -> Tensor:
    """Rows that undo one another."""
    signs = torch.tensor([1.0, -1.0]).repeat(positions // 2)
    return signs[None, :, None] * torch.randn(features, generator=generator)


@settings(max_examples=60, deadline=None)
@given(
    features=st.sampled_from([512, 2048, 4096, 16384]),
    positions=st.sampled_from([2, 4, 16]),
    form=st.sampled_from(["inputs", "gradients", "rows"]),
    value=st.floats(0.1, 1.0),
    spread=st.just(0.0) | st.floats(1e-4, 1e-2),
    seed=st.integers(0, 2**31),
)
@example(features=4096, positions=4, form="rows", value=0.57, spread=3e-3, seed=0)
@example(features=16384, positions=4, form="inputs", value=0.57, spread=5e-3, seed=0)
@example(features=16384, positions=4, form="gradients", value=0.57, spread=5e-3, seed=0)
def test_norms_are_bounds_where_positions_of_wide_layers_cancel(
    features: int, positions: int, form: str, value: float, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    wide = nearly_constant(positions, features, value, spread, generator)
    ghost: Gradient
    if form == "rows":
        wide *= torch.tensor([1.0, -1.0]).repeat(positions // 2)[None, :, None]
        ghost, narrow = RowsGhost(torch.zeros(1, positions, dtype=torch.int64), wide, 3), torch.ones(1, positions, 1)
    else:
        narrow = opposite(positions, 8, generator)
        ghost = MatrixGhost(wide, narrow) if form == "inputs" else MatrixGhost(narrow, wide)
    found, exact = float(ghost.norms_squared()), float((narrow.double().mT @ wide.double()).square().sum())
    together = float((narrow.double().norm(dim=2) * wide.double().norm(dim=2)).sum()) ** 2
    assert exact <= found <= exact + (features + 16) * torch.finfo(torch.float32).eps * together


@pytest.mark.parametrize("spread", [0.0, 1e-3, 2e-3, 4e-3])
@pytest.mark.parametrize("value", [0.3767, 0.5411, 0.6707, 0.9068])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(16384, 8, bias=False),
        nn.Linear(8, 16384, bias=False),
        nn.Conv2d(2048, 16, 1, bias=False),
        nn.Conv2d(16, 2048, 1, bias=False),
        nn.Embedding(4, 4096),
    ],
)
def test_an_example_of_a_wide_layer_adds_clip_norm_at_most(layer: nn.Module, value: float, spread: float) -> None:
    """As blank patches of an image do, some of them with a little noise."""
    generator = torch.Generator().manual_seed(0)
    outputs, inputs = layer.weight.shape[:2]
    if isinstance(layer, nn.Embedding):
        x = torch.zeros(1, 4, dtype=torch.int64)
        weights = nearly_constant(4, inputs, value, spread, generator) * torch.tensor([1.0, -1, 1, -1])[None, :, None]
    elif inputs > outputs:
        x, weights = nearly_constant(4, inputs, value, spread, generator), opposite(4, outputs, generator)
    else:
        x, weights = opposite(4, inputs, generator), nearly_constant(4, outputs, value, spread, generator)
    if isinstance(layer, nn.Conv2d):
        x, weights = (rows.mT.contiguous().unflatten(2, (2, 2)) for rows in (x, weights))
    with forms_chosen("ghost"):
        sums, _ = BookKeeper(layer).clipped_sum(lambda: (layer(x) * weights).flatten(1).sum(1), 1, 1e-3)
    assert float(sums[0].norm()) <= 1e-3


@pytest.mark.parametrize("clip_norm", [0.0, -1.0, 1e-25, 1e-9])
def test_clip_norms_that_float32_cannot_keep_are_refused(clip_norm: float) -> None:
    with pytest.raises(ValidationError):
        DpSgdSpec(name="a", dataset_size=9, expected_batch=3, steps=1, clip_norm=clip_norm)
    with pytest.raises(ValidationError):
        QuerySpec(name="a", kind="mean", dataset_size=9, sensitivity=clip_norm)


def losses_of(network: Denoiser, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
    return (network(x, t, y) - 1).square().flatten(1).mean(1)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_the_margin_is_far_above_the_rounding_of_a_real_network(scale: float) -> None:
    """The sum of a piece in float32, with everything that leads to it, against float64 for the same examples."""
    own = load_settings("letters-mnist", ["denoiser.channels=32"])
    assert isinstance(own, RapidSettings)
    torch.manual_seed(1)
    network = Denoiser.build(own, 10).eval()
    count = 48
    x = torch.randn(count, *own.latent_shape) * scale
    t, y = torch.randint(0, own.schedule.timesteps, (count,)), torch.randint(0, 10, (count,))
    single, _ = BookKeeper(network).clipped_sum(lambda: losses_of(network, x, t, y), count, CLIP_NORM)
    # the same examples in pieces of other sizes: what a neighbouring set would change for the others
    keeper = BookKeeper(network)
    others = keeper.zeros()
    for rows in torch.arange(count).split(7):
        keeper.clipped_sum(lambda rows=rows: losses_of(network, x[rows], t[rows], y[rows]), len(rows), CLIP_NORM,
                           into=lambda: others)  # fmt: skip
    network.double()
    double, _ = BookKeeper(network).clipped_sum(lambda: losses_of(network, x.double(), t, y), count, CLIP_NORM)

    def distance(one: list[Tensor], other: list[Tensor]) -> float:
        return math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(one, other, strict=True))) / CLIP_NORM

    assert distance(single, others) < ROUNDING_MARGIN / 100
    assert distance(single, double) < ROUNDING_MARGIN / 2
