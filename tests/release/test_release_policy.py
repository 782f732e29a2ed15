"""Policies: the example explains every default, and nothing is read that was not meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rapid.errors import InputError
from rapid.release.policy import Policy, read_policy

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy.yaml"


def written(folder: Path, text: str) -> Path:
    path = folder / "policy.yaml"
    path.write_text(text)
    return path


def test_the_example_has_every_default() -> None:
    assert read_policy(EXAMPLE) == Policy()
    listed = yaml.safe_load(EXAMPLE.read_text())
    expected = Policy().model_dump()
    assert listed.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, dict):
            assert listed[name].keys() == value.keys()


def test_what_is_left_out_is_strict(tmp_path: Path) -> None:
    assert read_policy(written(tmp_path, "")) == Policy()
    policy = read_policy(written(tmp_path, "max_epsilon: 8\nmax_delta: 1e-6\ncopies: {epsilon: 5e-1}"))
    assert (policy.max_epsilon, policy.max_delta, policy.copies.epsilon) == (8, 1e-6, 0.5)
    assert policy.copies.required
    assert policy.unit == "one person"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_epsillon: 1", "max_epsillon: there is no such setting"),
        ("copies: {max: 1}", "copies.max: there is no such setting"),
        ("max_epsilon: 1\nunit: one person\nmax_epsilon: 10", "'max_epsilon' stands twice"),
        ("copies: {epsilon: 1, epsilon: 2}", "'epsilon' stands twice"),
        ("max_epsilon: .inf", "max_epsilon: must be a finite number"),
        ("max_epsilon: .nan", "max_epsilon: must be a finite number"),
        ("max_epsilon: 0", "max_epsilon: must be more than 0"),
        ("max_epsilon: one", "max_epsilon: must be a number"),
        ("max_epsilon: true", "max_epsilon: must be a number"),
        ("max_delta: 1e-12", "max_delta: must be at least"),
        ("declared_classes: 1", "declared_classes: must be true or false"),
        ("copies: {required: 'no'}", "copies.required: must be true or false"),
        ("unit: everyone", "unit: must be 'one image' or 'one person'"),
        ("membership: {false_positive_rates: []}", "membership.false_positive_rates"),
        ("membership: {false_positive_rates: [0.1, 1]}", "membership.false_positive_rates.1"),
        ("copies:", "copies: must be a section"),
        ("- 1", "must hold settings"),
        ("a: [", "is not valid YAML"),
        ("max_epsilon: 2026-13-45", "is not valid YAML: a value is out of range"),
        ("a: " + "[" * 2000, "is not valid YAML: is nested too deeply"),
        ("a: \x00", "is not valid YAML"),
        ("a: !!python/object/apply:os.getcwd []", "is not valid YAML"),
        ("{[1]: 2}", "is not valid YAML"),
    ],
)
def test_a_bad_policy_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        read_policy(written(tmp_path, text))
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith("policy ")


def test_files_that_are_no_policy(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none", tmp_path, tmp_path / "bytes"):
        with pytest.raises(InputError, match="policy"):
            read_policy(path)


@settings(max_examples=30)
@given(st.floats(1e-9, 1e9))
def test_numbers_are_read_as_written(tmp_path_factory: pytest.TempPathFactory, number: float) -> None:
    """YAML 1.1 takes 1e-05 for text."""
    path = written(tmp_path_factory.getbasetemp(), f"max_epsilon: {number!r}")
    assert read_policy(path).max_epsilon == number
