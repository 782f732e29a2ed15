"""YAML that users write, compared with JSON, whose numbers are those of YAML 1.2 and which is YAML, too."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rapid.parsing import parse_yaml

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
WORDS = st.text("abcdefxyz_-.0123456789")
LEAVES = st.none() | st.booleans() | NUMBERS | WORDS
TREES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner), max_leaves=10)


@given(TREES)
def test_json_means_the_same(tree: Any) -> None:
    text = json.dumps(tree)
    assert parse_yaml(text) == json.loads(text)


@given(NUMBERS)
def test_numbers_mean_the_same_as_plain_words(number: float) -> None:
    """Also within a block, as in a file of settings."""
    found = parse_yaml(f"a: {json.dumps(number)}")["a"]
    assert (found, type(found)) == (number, type(number))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("-007", -7),
        ("1_000", 1000),
        ("1e-3", 0.001),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        (".inf", math.inf),
        ("1:30", "1:30"),
        ("0x10", "0x10"),
        ("1.2.3", "1.2.3"),
        ("yes", True),
    ],
)
def test_a_number_is_what_it_looks_like(text: str, value: object) -> None:
    found = parse_yaml(text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    "text", ["a: 1\nb: 2\na: 3", "{a: {b: 1, b: 1}}", "a: !!python/name:os.system", "1__", "a: !!int 0b1"]
)
def test_what_has_no_meaning_is_one_kind_of_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError):
        parse_yaml(text)


def test_a_section_can_be_taken_over_and_changed() -> None:
    found = parse_yaml("first: &first {a: 1, b: 2}\nsecond:\n  <<: *first\n  b: 3\n")
    assert found == {"first": {"a": 1, "b": 2}, "second": {"a": 1, "b": 3}}
    with pytest.raises(yaml.YAMLError, match="'b' stands twice"):
        parse_yaml("first: &first {a: 1}\nsecond: {<<: *first, b: 3, b: 4}")
