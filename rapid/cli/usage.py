"""A parser whose errors are one line each, in the words of all other errors."""

from __future__ import annotations

import argparse
import re
from difflib import get_close_matches
from typing import Any, NoReturn

_NOT_A_NUMBER = re.compile(r"argument (?P<name>\S+): invalid (?P<kind>int|float) value: '(?P<value>.*)'", re.DOTALL)
_NO_CHOICE = re.compile(
    r"argument (?P<name>\S+): invalid choice: '(?P<value>.*)' \(.*choose from (?P<choices>.*)\)", re.DOTALL
)
_REQUIRED = "the following arguments are required: "
_ONE_OF = re.compile(r"one of the arguments (.*) is required")
_KINDS = {"int": "a whole number", "float": "a number"}


class Parser(argparse.ArgumentParser):
    """An `argparse.ArgumentParser` that reports errors in one line, without the usage of all arguments."""

    # Any: namespaces of other types, which nobody gives here
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but a command refuses what it does not know by itself: it can tell what was meant."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            name = unknown[0].partition("=")[0]
            near = get_close_matches(name, self._option_string_actions, 1)
            self.error(f"{name}: unknown argument{f'; did you mean {near[0]}?' if near else ''}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and exit with 2."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and message.startswith(_REQUIRED):
                message = f"give {action.metavar}, one of {', '.join(action.choices)}"
        self.exit(2, f"rapid: {_in_words(message)}; see {self.prog} --help\n")


def _in_words(message: str) -> str:
    """What argparse says, in the form `name value: problem`."""
    if found := _NOT_A_NUMBER.fullmatch(message):
        return f"{found['name']} {found['value']}: must be {_KINDS[found['kind']]}"
    if found := _NO_CHOICE.fullmatch(message):
        choices = [choice.strip("'") for choice in found["choices"].split(", ")]
        near = get_close_matches(found["value"], choices, 1)
        better = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(choices)}"
        return f"{found['name']} {found['value']}: unknown; {better}"
    if message.startswith(_REQUIRED):
        return f"give {message.removeprefix(_REQUIRED).replace(', ', ' and ')}"
    if found := _ONE_OF.fullmatch(message):
        return f"give {found[1].replace(' ', ' or ')}"
    return " ".join(message.removeprefix("argument ").split())
