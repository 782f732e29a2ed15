"""BookKeeper against a loop over single examples, on single layers and small networks."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from oracles.bookkeeper import compare, compare_layer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rapid.dp.gradients import BookKeeper, UnsupportedLayer
from rapid.dp.gradients.forms import ROUNDING_MARGIN


def test_sums_add_to_what_is_there() -> None:
    model = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    keeper = BookKeeper(model)
    fresh, _ = keeper.clipped_sum(lambda: model(x).square().sum(1), 4, 1.0)
    into = [torch.ones_like(part) for part in fresh]
    keeper.clipped_sum(lambda: model(x).square().sum(1), 4, 1.0, into=lambda: into)
    torch.testing.assert_close(into, [part + 1 for part in fresh])


def test_a_layer_that_is_called_twice() -> None:
    for layer, x in ((nn.Linear(4, 4), torch.randn(3, 4)), (nn.Conv2d(2, 2, 3, padding=1), torch.randn(3, 2, 9, 9))):
        compare_layer(nn.Sequential(layer, nn.Tanh(), layer), x)
    norm = nn.GroupNorm(1, 4)
    compare_layer(nn.Sequential(norm, nn.Tanh(), norm), torch.randn(3, 4, 2))


def test_in_place_operations_after_a_layer() -> None:
    compare_layer(nn.Sequential(nn.Linear(4, 4), nn.SiLU(inplace=True), nn.Linear(4, 2)), torch.randn(3, 4))


def test_a_call_without_gradients_has_no_part() -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(3, 4)

    def losses(rows: slice) -> Tensor:
        with torch.no_grad():
            target = model(x[rows]).cos()
        return (model(x[rows]) - target).square().sum(1)

    compare(model, losses, 3, 0.5, 1e-4)


def test_a_parameter_used_outside_its_layer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    with pytest.raises(UnsupportedLayer, match=r"layer '1' \(Linear\) has a parameter, 'weight', that is used outside"):
        BookKeeper(model).clipped_sum(lambda: (model(x) @ model[1].weight).sum(1), 3, 1.0)


def test_a_use_outside_is_seen_through_the_casts_of_autocast() -> None:
    """Autocast's cache would let both uses share one cast of the weight."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.randn(3, 4)

    def losses() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = model[0](x)
            return (model[1](hidden) + F.linear(hidden, model[1].weight)).float().sum(1)

    with pytest.raises(UnsupportedLayer, match="is used outside"):
        BookKeeper(model).clipped_sum(losses, 3, 1.0)
    assert torch.is_autocast_cache_enabled()


def test_autocast_around_everything_does_not_reach_the_sums() -> None:
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    x = torch.randn(3, 5, 64)
    keeper = BookKeeper(model)
    wanted, norms = keeper.clipped_sum(lambda: model(x).square().flatten(1).sum(1), 3, 1.0)

    def losses() -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return model(x).square().flatten(1).sum(1)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = keeper.clipped_sum(losses, 3, 1.0)
    torch.testing.assert_close(found, (wanted, norms))


def test_a_parameter_used_instead_of_its_layer_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    x = torch.randn(3, 4)

    def losses() -> Tensor:
        hidden = model[0](x)
        model[1](hidden)  # without a part in the losses
        return F.linear(hidden, model[1].weight).sum(1)

    for case in (losses, lambda: F.linear(x, model[0].weight).sum(1)):
        with pytest.raises(UnsupportedLayer, match="is used outside"):
            BookKeeper(model).clipped_sum(case, 3, 1.0)


def test_a_network_that_keeps_what_it_saw_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    model.register_buffer("seen", torch.zeros(4))
    x = torch.randn(3, 4)

    def losses() -> Tensor:
        model.seen += x.sum(0)
        return model(x).sum(1)

    with pytest.raises(UnsupportedLayer, match="buffers"):
        BookKeeper(model).clipped_sum(losses, 3, 1.0)


def test_hooks_of_others_that_change_outputs() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda _layer, _args, output: output.cos() * 3)
    model[1].register_forward_pre_hook(lambda _layer, args: (args[0] * 2,))
    compare_layer(model, torch.randn(3, 4))


def test_parameters_that_the_rule_does_not_know_are_refused() -> None:
    layer = nn.Linear(2, 2)
    layer.scale = nn.Parameter(torch.ones(2))
    with pytest.raises(UnsupportedLayer, match="rule that is not for these trainable parameters: scale"):
        BookKeeper(nn.Sequential(layer)).clipped_sum(lambda: layer(torch.ones(3, 2)).sum(1), 3, 1.0)


def test_other_tensors_that_require_gradients_are_refused() -> None:
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(3, 4)
    with pytest.raises(UnsupportedLayer, match="not trained here"):
        BookKeeper(model).clipped_sum(lambda: model(other(x)).sum(1), 3, 1.0)
    assert other.weight.grad is None
    other.requires_grad_(False)
    BookKeeper(model).clipped_sum(lambda: model(other(x)).sum(1), 3, 1.0)


def test_gradient_checkpointing() -> None:
    """Without re-entrance it changes nothing; with it there is an error, and no gradient on the side."""
    model = nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4, requires_grad=True)

    def losses(rows: slice, reentrant: bool) -> Tensor:
        hidden: Tensor = checkpoint(model, x.detach()[rows], use_reentrant=reentrant)
        return hidden.square().sum(1)

    compare(model, lambda rows: losses(rows, False), 3, 0.5, 1e-4)
    with warnings.catch_warnings(), pytest.raises(ValueError, match="no trained parameter"):
        warnings.simplefilter("ignore")
        BookKeeper(model).clipped_sum(lambda: losses(slice(None), True), 3, 0.5)
    assert all(p.grad is None for p in model.parameters())


@settings(deadline=None)
@given(scale=st.floats(-40, 37), output=st.floats(-40, 37), clip_norm=st.sampled_from([1e-8, 1e-3, 1.0, 1e4]))
@example(scale=22.0, output=23.45, clip_norm=1.0)
@example(scale=3.0, output=34.155, clip_norm=1e-8)
def test_no_example_adds_more_than_clip_norm_at_any_scale(scale: float, output: float, clip_norm: float) -> None:
    """Weights clip_norm / norm may lie among float32's subnormal numbers, of which there are few."""
    model = nn.Linear(3, 2, bias=False)
    x = torch.zeros(1, 3).index_fill(1, torch.tensor(0), 10**scale)
    (total,), _ = BookKeeper(model).clipped_sum(lambda: model(x)[:, 0] * 10**output, 1, clip_norm)
    assert float(total.norm()) <= clip_norm


@settings(max_examples=20, deadline=None)
@given(scale=st.floats(-3, 3), clip_norm=st.floats(1e-2, 1e2))
def test_bfloat16_is_clipped_and_summed_in_more(scale: float, clip_norm: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.SiLU(), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(128, 3))
    x = torch.randn(5, 2, 4, 4) * 10**scale

    def losses(rows: slice = slice(None)) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x[rows]).float().square().sum(1)

    keeper = BookKeeper(model)
    for number in range(5):
        sums, norms = keeper.clipped_sum(lambda n=number: losses(slice(n, n + 1)), 1, clip_norm)
        assert all(part.dtype == torch.float64 for part in sums)
        total = torch.cat([part.double().flatten() for part in sums]).norm().item()
        assert total <= clip_norm
        assert total == pytest.approx(min(clip_norm / (1 + ROUNDING_MARGIN), norms.item()), rel=1e-3)
    exact, _ = keeper.clipped_sum(lambda: model(x).square().sum(1), 5, clip_norm)
    rough, _ = keeper.clipped_sum(losses, 5, clip_norm)
    gap, whole = (torch.cat([p.flatten() for p in parts]).norm() for parts in (_minus(exact, rough), exact))
    assert gap <= 0.1 * whole


def _minus(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    return [a - b for a, b in zip(first, second, strict=True)]


def test_an_input_that_is_changed_after_it_was_read_is_refused() -> None:
    layer, second = nn.Linear(4, 4), nn.Linear(4, 4)
    x = torch.randn(3, 4)

    def losses() -> Tensor:
        hidden = layer(x) * 1.0
        out = second(hidden)
        hidden += 1
        return (out + hidden).sum(1)

    with pytest.raises(UnsupportedLayer, match="changed in place"):
        BookKeeper(nn.ModuleList([layer, second])).clipped_sum(losses, 3, 1.0)


def test_frozen_parameters_have_no_part() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    compare_layer(model, torch.randn(3, 4))
    assert BookKeeper(model).parameters == [model[1].weight]


def test_a_layer_that_is_not_reached_gets_zeros() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    x = torch.randn(3, 2)
    sums, _ = BookKeeper(model).clipped_sum(lambda: model[0](x).square().sum(1), 3, 1.0)
    assert all(not part.any() for part in sums[2:])
    assert sums[0].any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_non_finite_examples_count_as_zero(bad: float) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(18, 2))
    x = torch.randn(4, 1, 7, 7)
    keeper = BookKeeper(model)
    good, _ = keeper.clipped_sum(lambda: model(x[:3]).square().sum(1), 3, 0.5)
    x[3, 0, 2, 2] = bad
    found, norms = keeper.clipped_sum(lambda: model(x).square().sum(1), 4, 0.5)
    assert not torch.isfinite(norms[3])
    torch.testing.assert_close(found, good, rtol=1e-5, atol=1e-7)


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(-6, 6), clip_norm=st.floats(1e-3, 1e3))
def test_one_example_never_adds_more_than_clip_norm(scale: float, clip_norm: float) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    x = torch.randn(1, 8) * 10**scale
    sums, _ = BookKeeper(model).clipped_sum(lambda: model(x).square().sum(1), 1, clip_norm)
    norm = torch.cat([part.double().flatten() for part in sums]).norm().item()
    assert norm <= clip_norm
    assert norm == 0 or norm < 1.1 * clip_norm / (1 + ROUNDING_MARGIN)


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm2d(2),
        nn.Sequential(nn.InstanceNorm2d(2, track_running_stats=True), nn.Linear(2, 2)),
        nn.Embedding(3, 2, max_norm=1.0),
        nn.ModuleList([nn.BatchNorm2d(2, affine=False), nn.Linear(2, 2)]),
        nn.ParameterList([nn.Parameter(torch.zeros(2))]),
    ],
    ids=[
        "BatchNorm2d",
        "running statistics",
        "max_norm",
        "BatchNorm2d without weights",
        "bare parameter",
    ],
)
def test_layers_that_mix_examples_are_refused_by_name(layer: nn.Module) -> None:
    with pytest.raises(UnsupportedLayer, match="odd"):
        BookKeeper(nn.ModuleDict({"odd": layer}))


def test_shared_parameters_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    with pytest.raises(UnsupportedLayer, match="'a' and 'b' share"):
        BookKeeper(model)


def test_nothing_trainable_is_refused() -> None:
    with pytest.raises(ValueError, match="trainable"):
        BookKeeper(nn.Linear(2, 2).requires_grad_(False))


def test_the_network_is_left_as_it_was_when_losses_fail() -> None:
    model = nn.Linear(2, 2)
    keeper = BookKeeper(model)

    def losses() -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keeper.clipped_sum(losses, 1, 1.0)
    assert all(p.requires_grad for p in model.parameters())
    assert not model._forward_hooks


def test_losses_of_another_shape_are_refused() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="shape"):
        BookKeeper(model).clipped_sum(lambda: model(torch.zeros(3, 2)).mean(), 3, 1.0)
