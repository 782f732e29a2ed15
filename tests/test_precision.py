"""Exact float32: whichever of torch's settings a caller has used, and the settings afterwards."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from threading import Event, Thread

import numpy as np
import pytest
import torch
from oracles.gradients import clipped_sum
from rapid_variants import make
from torch import Tensor, nn

from rapid.bundle import Bundle
from rapid.dp.gradients import BookKeeper
from rapid.precision import exact_float32, float32_error
from rapid.sampling.generate import generate

SETTINGS = tuple(itertools.product(("cuda", "mkldnn"), ("all", "matmul", "conv", "rnn")))
BACKENDS = torch.backends

Choice = Callable[[], object]
LEGACY: dict[str, Choice] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "matmul": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "no convolutions": lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
}
NEW: dict[str, Choice] = {
    "nothing": lambda: None,
    "all": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
    "all bfloat16": lambda: setattr(BACKENDS, "fp32_precision", "bf16"),
    "all exact": lambda: setattr(BACKENDS, "fp32_precision", "ieee"),
    "cuda": lambda: setattr(BACKENDS.cudnn, "fp32_precision", "tf32"),
    "cuda matmul": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
    "cuda matmul exact": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "ieee"),
    "convolutions": lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "tf32"),
    "convolutions exact": lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "ieee"),
    "recurrent": lambda: setattr(BACKENDS.cudnn.rnn, "fp32_precision", "none"),
    "cpu matmul": lambda: setattr(BACKENDS.mkldnn.matmul, "fp32_precision", "bf16"),
    "cpu convolutions": lambda: setattr(BACKENDS.mkldnn.conv, "fp32_precision", "bf16"),
}
COMBINATIONS = list(itertools.product(LEGACY, NEW))


def chosen() -> dict[tuple[str, str], str]:
    """Every setting as it is in force."""
    return {pair: torch._C._get_fp32_precision_getter(*pair) for pair in (("generic", "all"), *SETTINGS)}


def reset() -> None:
    """Torch's settings at the start of a process."""
    torch.set_float32_matmul_precision("highest")
    BACKENDS.cudnn.allow_tf32 = True
    for pair in (("generic", "all"), *SETTINGS):
        torch._C._set_fp32_precision_setter(*pair, "none")
    for operation in ("conv", "rnn"):
        torch._C._set_fp32_precision_setter("cuda", operation, "tf32")


@pytest.fixture(autouse=True)
def _settings_of_a_new_process() -> Iterator[None]:
    reset()
    yield
    reset()


def test_the_fixture_knows_how_a_process_starts() -> None:
    assert chosen() == {
        ("generic", "all"): "none",
        **{pair: "tf32" if pair in (("cuda", "conv"), ("cuda", "rnn")) else "none" for pair in SETTINGS},
    }


@pytest.mark.parametrize(("legacy", "new"), COMBINATIONS)
def test_all_is_exact_within_and_as_before_after(legacy: str, new: str) -> None:
    LEGACY[legacy]()
    NEW[new]()
    before = chosen()
    with exact_float32():
        assert set(chosen().values()) == {"ieee"}
        assert float32_error(torch.device("cuda")) == torch.finfo(torch.float32).eps
        with exact_float32():
            pass
        assert set(chosen().values()) == {"ieee"}
    assert chosen() == before
    # what followed a more general setting still does
    BACKENDS.fp32_precision = "tf32"
    found = chosen()
    reset()
    LEGACY[legacy]()
    NEW[new]()
    BACKENDS.fp32_precision = "tf32"
    assert found == chosen()


@pytest.mark.parametrize(("legacy", "new"), [("nothing", "cuda matmul"), ("high", "cpu matmul"), ("matmul", "all")])
def test_an_error_brings_the_settings_back(legacy: str, new: str) -> None:
    LEGACY[legacy]()
    NEW[new]()
    before = chosen()
    with pytest.raises(ZeroDivisionError), exact_float32():
        raise ZeroDivisionError
    assert chosen() == before


def test_threads_that_overlap_are_exact_to_their_end() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    before, entered, leave = chosen(), Event(), Event()

    def other() -> None:
        with exact_float32():
            entered.set()
            leave.wait(60)

    with exact_float32():
        thread = Thread(target=other)
        thread.start()
        entered.wait(60)
    assert set(chosen().values()) == {"ieee"}
    leave.set()
    thread.join()
    assert chosen() == before


class Scale(nn.Module):
    """A layer without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


@pytest.mark.filterwarnings("ignore:.*exact but slow:UserWarning")
@pytest.mark.parametrize(("legacy", "new"), COMBINATIONS)
def test_clipped_sums_are_right_under_each_setting(legacy: str, new: str) -> None:
    torch.manual_seed(0)
    network, x = nn.Sequential(nn.Linear(3, 4), Scale(), nn.Linear(4, 2)).double(), torch.randn(5, 3).double()
    LEGACY[legacy]()
    NEW[new]()
    before = chosen()

    def losses(rows: slice) -> Tensor:
        return network(x[rows]).square().sum(1)

    found, _ = BookKeeper(network).clipped_sum(lambda: losses(slice(None)), len(x), 0.5)
    assert chosen() == before
    expected, _ = clipped_sum(list(network.parameters()), losses, len(x), 0.5)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)


def test_the_network_of_a_clipped_sum_has_all_digits_forwards_and_backwards() -> None:
    """What is beside an example must not change its gradient, so not how the network rounds either."""
    BACKENDS.fp32_precision = "tf32"
    seen = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            seen.append(set(chosen().values()))
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            seen.append(set(chosen().values()))
            return grad

    network = nn.Linear(3, 2)
    BookKeeper(network).clipped_sum(lambda: Looks.apply(network(torch.ones(4, 3))).sum(1), 4, 0.5)
    assert seen == [{"ieee"}, {"ieee"}]


def test_some_of_these_settings_cannot_be_read_in_the_old_way() -> None:
    """Which is why nothing here reads them so."""
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="mix"):
        torch.get_float32_matmul_precision()


def test_products_on_a_cpu_have_all_digits() -> None:
    BACKENDS.mkldnn.matmul.fp32_precision = "bf16"
    torch.manual_seed(0)
    a, b = torch.randn(2, 256, 256)
    exact = a.double() @ b.double()

    def error() -> float:
        return float(((a @ b) - exact).abs().max())

    with exact_float32():
        assert error() < 1e-3
    if error() < 1e-3:
        pytest.skip("this CPU has no shorter products")


def test_images_of_a_seed_do_not_depend_on_the_setting(private: Bundle) -> None:
    generator = make(private, steps=20)
    expected = generate(generator, 3, seed=1).images
    torch.set_float32_matmul_precision("medium")
    BACKENDS.mkldnn.conv.fp32_precision = "bf16"
    np.testing.assert_array_equal(generate(generator, 3, seed=1).images, expected)
