"""Errors of usage: one line on stderr that names the argument, exit code 2, nothing on stdout."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from rapid.cli import main
from rapid.cli.arguments import given_path
from rapid.cli.parser import build_parser


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("", "give COMMAND, one of build-kb, plan, train-private, .*, demo; see rapid --help"),
        ("ledger", "give ACTION, one of show, limit, verify; see rapid ledger --help"),
        ("traim-private", "COMMAND traim-private: unknown; did you mean train-private?; see rapid --help"),
        ("xyz", "COMMAND xyz: unknown; choose one of build-kb, plan, .*, demo; see rapid --help"),
        ("generate --model m --out a.npz --count x", "--count x: must be a whole number; see rapid generate --help"),
        ("evaluate --real a --epochs 1.5", "--epochs 1.5: must be a whole number; see rapid evaluate --help"),
        ("plan --size 3 --delta small", "--delta small: must be a number; see rapid plan --help"),
        ("generate --count 2", "give --model and --out; see rapid generate --help"),
        ("plan", "give --size or --private; see rapid plan --help"),
        ("plan --size 3 --private a", "--private: not allowed with argument --size; see rapid plan --help"),
        ("serve --log-format xml", "--log-format xml: unknown; choose one of text, json; see rapid serve --help"),
        ("plan --size 3 --epsilom=2", "--epsilom: unknown argument; did you mean --epsilon?; see rapid plan --help"),
        ("generate --model m --out a.npz more", "more: unknown argument; see rapid generate --help"),
        ("ledger show --lim", "--lim: unknown argument; see rapid ledger show --help"),
        ("train-private --epsilon", "--epsilon: expected one argument; see rapid train-private --help"),
    ],
)
def test_a_wrong_command_is_one_line(command: str, line: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(command.split())
    out, err = capfd.readouterr()
    assert (caught.value.code, out) == (2, "")
    beginning, _, end = f"rapid: {line}\n".partition(".*")
    assert err.startswith(beginning)
    assert err.endswith(end)
    assert err.count("\n") == 1


def test_values_of_several_lines_are_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["generate", "--model", "m", "--out", "a", "--count", "1\n2"])
    assert capfd.readouterr().err == "rapid: --count 1\\n2: must be a whole number; see rapid generate --help\n"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["train-private", "--private", "", "--epsilon", "1", "--out", "o"], "--private"),
        (["train-private", "--private", "p", "--epsilon", "1", "--out", ""], "--out"),
        (["build-kb", "--public", "a", "--public", "", "--out", "o"], "--public"),
        (["generate", "--model=", "--count", "1", "--out", "o"], "--model"),
        (["evaluate", "--real", " ", "--out", "o.json"], "--real"),
        (["info", ""], "DIR"),
        (["ledger", "show", ""], "DATASET"),
        (["ledger", "limit", "", "--epsilon", "1", "--delta", "1e-5"], "DATASET"),
        (["ledger", "verify", "--ledger", ""], "--ledger"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    command: list[str], name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such as a variable of the shell that was never set."""
    with pytest.raises(SystemExit) as caught:
        main(command)
    out, err = capfd.readouterr()
    assert (caught.value.code, out) == (2, "")
    words = "ledger " + command[1] if command[0] == "ledger" else command[0]
    assert err == f"rapid: {name}: is empty; give a path; see rapid {words} --help\n"


def test_no_argument_takes_an_empty_path() -> None:
    parsers: list[argparse.ArgumentParser] = [build_parser()]
    kinds = set()
    for parser in parsers:
        for action in parser._actions:
            kinds.add(action.type)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    assert given_path in kinds
    assert Path not in kinds
