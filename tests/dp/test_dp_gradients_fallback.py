"""Layers without a rule: the exact fallback against a loop over single examples, and what it refuses."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.bookkeeper import compare, compare_layer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rapid.dp.gradients import BookKeeper, UnsupportedLayer

counts = st.sampled_from([0, 1, 2, 5])
draws_of = st.sampled_from([1, 2])
pytestmark = pytest.mark.filterwarnings("ignore:.*exact but slow:UserWarning")


def scalars(output: Tensor) -> Tensor:
    """A loss a row with gradients everywhere."""
    flat = output.flatten(1)
    return (flat * torch.linspace(-1, 1, flat.shape[1]) + 0.5 * flat**2).sum(1)


def refused(layer: nn.Module, losses: Callable[[], Tensor], match: str, count: int = 3) -> None:
    with pytest.raises(UnsupportedLayer, match=match):
        BookKeeper(layer).clipped_sum(losses, count, 1.0)


class Twice(nn.Module):
    """Own parameters, one of which is used twice, beside a child with a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))])
        self.child = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.weight) * self.scales[0]
        return self.child(hidden) @ self.weight.T + self.scales[1]


@settings(max_examples=30, deadline=None)
@given(count=counts, draws=draws_of, shape=st.lists(st.integers(1, 3), max_size=2), twice=st.booleans())
def test_own_parameters_used_twice(count: int, draws: int, shape: list[int], twice: bool) -> None:
    layer = Twice()
    model = nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh(), *([layer] if twice else []))
    compare_layer(model, torch.randn(count * draws, *shape, 4), draws=draws)


class Scaled(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_parameter_may_be_a_scalar(count: int) -> None:
    compare_layer(nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Tanh()), torch.randn(count, 4), draws=1)


@settings(max_examples=60, deadline=None)
@given(
    count=counts, draws=draws_of, groups=st.sampled_from([1, 2]), kernel=st.integers(1, 3), stride=st.integers(1, 2),
    padding=st.integers(0, 2), length=st.integers(1, 7), bias=st.booleans(),
    mode=st.sampled_from(["zeros", "circular"]),
)  # fmt: skip
def test_conv1d(
    count: int, draws: int, groups: int, kernel: int, stride: int, padding: int, length: int, bias: bool, mode: str
) -> None:
    assume(length + 2 * padding >= kernel and length >= padding)
    layer = nn.Conv1d(2, 4, kernel, stride, padding, groups=groups, bias=bias, padding_mode=mode)
    compare_layer(layer, torch.randn(count * draws, 2, length), draws=draws)


@settings(max_examples=40, deadline=None)
@given(
    count=counts, draws=draws_of, groups=st.sampled_from([1, 2]), kernel=st.integers(1, 3), stride=st.integers(1, 2),
    size=st.sampled_from([(1, 1), (3, 2), (5, 4)]), channels_last=st.booleans(),
)  # fmt: skip
def test_conv_transpose2d(
    count: int, draws: int, groups: int, kernel: int, stride: int, size: tuple[int, int], channels_last: bool
) -> None:
    x = torch.randn(count * draws, 4, *size)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    compare_layer(nn.ConvTranspose2d(4, 2, kernel, stride, groups=groups), x, draws=draws)


@settings(max_examples=30, deadline=None)
@given(count=counts, draws=draws_of, length=st.integers(1, 4), train=st.booleans(), weights=st.booleans())
def test_multihead_attention(count: int, draws: int, length: int, train: bool, weights: bool) -> None:
    """Its projections are parameters of its own and of a child that it never calls; it returns one or two tensors."""
    attention = nn.MultiheadAttention(4, 2, batch_first=True).train(train)
    first = nn.Linear(4, 4)
    x = torch.randn(count * draws, length, 4)
    hidden = torch.rand(count * draws, length) < 0.3
    hidden[:, 0] = False

    def losses(rows: slice) -> Tensor:
        query = first(x[rows])
        out, seen = attention(query, x[rows], query.cos(), key_padding_mask=hidden[rows], need_weights=weights)
        return scalars(out) + (scalars(seen) if weights else 0)

    compare(nn.ModuleList([first, attention]), losses, count, 0.7, 1e-4, draws)


@settings(max_examples=30, deadline=None)
@given(count=counts, draws=draws_of, width=st.integers(1, 3))
def test_prelu_and_bilinear(count: int, draws: int, width: int) -> None:
    compare_layer(nn.Sequential(nn.PReLU(width)), torch.randn(count * draws, width, 2), draws=draws)
    x, y = torch.randn(count * draws, width), torch.randn(count * draws, 2)
    layer = nn.Bilinear(width, 2, 3)
    compare(layer, lambda rows: scalars(layer(x[rows], y[rows])), count, 0.7, 1e-4, draws)


@pytest.mark.parametrize(
    "layer",
    [
        nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 3, 2)),
        nn.Conv3d(2, 3, (1, 2, 2)),
        type("Special", (nn.Conv2d,), {})(2, 3, 2),
    ],
    ids=["weight_norm", "Conv3d", "subclass"],
)
def test_other_layers(layer: nn.Module) -> None:
    shape = (2, 1, 3, 4) if isinstance(layer, nn.Conv3d) else (2, 3, 4)
    compare_layer(layer, torch.randn(6, *shape), draws=2)


def test_a_transformer_layer() -> None:
    compare_layer(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), torch.randn(6, 3, 4), draws=2)


class Chain(nn.Module):
    """Two outputs, the second computed from the first, and a tensor that all examples share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, table: Tensor, *, power: int) -> dict[str, Tensor]:
        first = x @ self.weight
        return {"first": first, "second": (first + table) ** power * self.shift}


@pytest.mark.parametrize("used", [("first",), ("second",), ("first", "second")])
def test_outputs_that_depend_on_each_other(used: tuple[str, ...]) -> None:
    layer = Chain()
    x, table = torch.randn(6, 4), torch.randn(4)

    def losses(rows: slice) -> Tensor:
        found = layer(x[rows], table, power=2)
        return sum((scalars(found[name]) for name in used), torch.zeros(()))

    compare(layer, losses, 3, 0.7, 1e-4, 2)


@pytest.mark.parametrize("draws", [1, 3])
def test_non_finite_examples_count_as_zero(draws: int) -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(6, 2))
    x = torch.randn(4 * draws, 1, 5)
    keeper = BookKeeper(model)
    good, _ = keeper.clipped_sum(lambda: scalars(model(x[: 3 * draws])), 3, 0.5, multiplicity=draws)
    for bad in (float("nan"), float("inf"), 1e30):
        x[-1, 0, 2] = bad
        found, norms = keeper.clipped_sum(lambda: scalars(model(x)), 4, 0.5, multiplicity=draws)
        assert not torch.isfinite(norms[3])
        torch.testing.assert_close(found, good, rtol=1e-5, atol=1e-7)


def test_bfloat16_is_clipped_and_summed_in_more() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 8, 3, padding=1), nn.SiLU(), Twice8())
    x = torch.randn(5, 2, 4)

    def losses() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return scalars(model(x).float())

    keeper = BookKeeper(model)
    exact, _ = keeper.clipped_sum(lambda: scalars(model(x)), 5, 1.0)
    rough, _ = keeper.clipped_sum(losses, 5, 1.0)
    assert all(part.dtype == torch.float64 for part in rough)
    gap = sum((a - b).square().sum() for a, b in zip(exact, rough, strict=True))
    assert gap <= 0.05**2 * sum(part.square().sum() for part in exact)


class Twice8(nn.Module):
    """Uses its weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight) @ self.weight


def test_gradient_checkpointing() -> None:
    model = nn.Sequential(Twice8(), nn.SiLU(), nn.Conv1d(2, 2, 1))
    x = torch.randn(3, 2, 4)
    compare(model, lambda rows: scalars(checkpoint(model, x[rows], use_reentrant=False)), 3, 0.5, 1e-4)


def test_hooks_of_others_are_outside_of_the_layer() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), Twice8())
    model[0].register_forward_hook(lambda _layer, _args, output: output.cos() * 3)
    model[1].register_forward_pre_hook(lambda _layer, args: (args[0] * 2,))
    compare_layer(model, torch.randn(3, 2, 4))


def test_one_warning_for_each_type_of_layer() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1), nn.Linear(2, 2), nn.PReLU())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        BookKeeper(model)
    texts = sorted(str(warning.message) for warning in caught)
    assert [text.split(":")[0] for text in texts] == [
        "layer '0' (Conv1d) has no per-example rule",
        "layer '3' (PReLU) has no per-example rule",
    ]
    assert all("register" in text for text in texts)


class Centred(nn.Module):
    """Mixes examples."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.scale


class Noisy(Centred):
    """Is random."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5) * self.scale


class Alternating(Centred):
    """Gives something else each time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.scale * self.calls


class Branching(Centred):
    """Decides by the values of all examples."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if x.sum() > 0 else x


@pytest.mark.parametrize("kind", [Centred, Noisy, Alternating, Branching])
@pytest.mark.parametrize("count", [2, 5])
def test_layers_that_do_not_treat_examples_alone_are_refused(kind: type[Centred], count: int) -> None:
    layer, x = kind(), torch.rand(count, 4)
    refused(nn.ModuleDict({"odd": layer}), lambda: scalars(layer(x)), r"layer 'odd' \(", count)


def test_draws_of_one_example_must_not_mix_either() -> None:
    layer, x = Centred(), torch.rand(2, 4)
    with pytest.raises(UnsupportedLayer, match="mixes examples"):
        BookKeeper(layer).clipped_sum(lambda: scalars(layer(x)), 1, 1.0, multiplicity=2)


def test_dropout_within_attention_is_refused_while_it_trains() -> None:
    layer = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    x = torch.randn(3, 2, 4)
    refused(layer, lambda: scalars(layer(x, x, x)[0]), "MultiheadAttention")
    layer.eval()
    BookKeeper(layer).clipped_sum(lambda: scalars(layer(x, x, x)[0]), 3, 1.0)


def test_attention_whose_first_dimension_is_not_the_batch_is_refused() -> None:
    layer = nn.MultiheadAttention(4, 2)
    for length in (3, 5):
        x = torch.randn(length, 3, 4)
        refused(layer, lambda x=x: scalars(layer(x, x, x)[0].transpose(0, 1)), "MultiheadAttention")


def test_recurrent_layers_are_refused() -> None:
    layer = nn.GRU(4, 2, batch_first=True)
    x = torch.randn(3, 5, 4)
    refused(layer, lambda: scalars(layer(x)[0]), "GRU")


def test_uses_outside_of_the_forward_are_refused() -> None:
    layer, x = Twice8(), torch.randn(3, 4)
    refused(layer, lambda: scalars(layer(x)) + (x @ layer.weight).sum(1), "'weight', that is used outside")
    refused(layer, lambda: scalars(x @ layer.weight), "'weight', that is used outside")


class Given(nn.Module):
    """Uses a tensor that was set from outside, and keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.other: Tensor = torch.zeros(4)
        self.kept: Tensor = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x @ self.weight
        return self.kept.tanh() + self.other


def test_what_a_layer_keeps_is_left_as_the_forward_pass_left_it() -> None:
    layer, x = Given(), torch.randn(3, 4)
    BookKeeper(layer).clipped_sum(lambda: scalars(layer(x)), 3, 1.0)
    torch.testing.assert_close(layer.kept, x @ layer.weight)


def test_tensors_that_come_in_by_the_back_door_are_refused() -> None:
    """The weight has a part in the output that a gradient for this call alone would miss."""
    layer, x = Given(), torch.randn(3, 4)

    def losses() -> Tensor:
        layer.other = layer.weight.sum(0)
        return scalars(layer(x))

    refused(layer, losses, "'weight', that is used outside")


def test_tensors_that_go_out_by_the_back_door_are_refused() -> None:
    layer, x = Given(), torch.randn(3, 4)
    refused(layer, lambda: scalars(layer(x)) + scalars(layer.kept), "used elsewhere")
    refused(layer, lambda: scalars(layer(x).detach() + layer.kept), "outside|elsewhere")


def test_keywords_and_shapes_that_hide_the_examples_are_refused() -> None:
    layer, linear = Twice8(), nn.Linear(4, 2)
    x = torch.randn(3, 4)
    refused(layer, lambda: scalars(layer(x=x)), "keyword arguments only")
    refused(layer, lambda: scalars(layer(x.repeat(2, 1)))[:3], "other than one row an example")
    refused(linear, lambda: scalars(linear(input=x)), "keyword arguments only")


def test_an_input_that_is_changed_after_it_was_read_is_refused() -> None:
    first, layer = nn.Linear(4, 4), nn.Bilinear(4, 4, 2)
    x = torch.randn(3, 4)

    def losses() -> Tensor:
        hidden, still = first(x) * 1.0, first(x)
        out = layer(still, hidden.detach())
        hidden.detach().add_(1)
        return scalars(out)

    refused(nn.ModuleList([first, layer]), losses, "changed in place")


def test_a_buffer_that_changes_is_refused() -> None:
    class Counting(Twice8):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return super().forward(x)

    layer, x = Counting(), torch.randn(3, 4)
    refused(layer, lambda: scalars(layer(x)), "buffers")
