"""`rapid plan`: what is refused or warned of before anything is spent, in words that name what was given."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from rapid.cli import main


@pytest.fixture(autouse=True)
def _shown() -> Iterator[None]:
    """Warnings are printed, as a process prints them."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield


def test_a_large_delta_is_warned_of(capfd: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--size", "300", "--method", "dpdm", "--batch", "30", "--steps", "5", "--delta"]
    for delta, warned in (("0.01", True), ("0.003", False)):
        assert main([*command, delta]) == 0
        words = f"rapid: warning: --delta {delta} is more than 1/N = 0.0033: publishing a random image would satisfy it"
        assert (words in capfd.readouterr().err) == warned


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan --size 1", "--size 1: is a single image, and noise hides one among many; give more images"),
        ("plan --size 1 --unit-folders", "--size 1: is a single person, and noise hides one among many; give more"),
        ("plan --size 100 --batch 200", "--batch 200: "),
        ("plan --size 100 --set private.expected_batch=200 --batch 50 --batch 300", "--batch 300: "),
    ],
)
def test_what_was_given_is_named(command: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    assert capfd.readouterr().err.splitlines()[-1].startswith(f"rapid: {words}")
