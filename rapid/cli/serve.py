"""`rapid serve` and `rapid token`, which need the extra `serve`."""

from __future__ import annotations

import argparse
import os
import sys

from rapid.errors import InputError


def serve(options: argparse.Namespace) -> None:
    """`rapid serve`."""
    try:
        from rapid_server.run import serve as run
        from rapid_server.settings import load
    except ModuleNotFoundError as error:
        raise _not_installed("serve", error) from None
    flags = {name: value for name, value in vars(options).items() if name not in ("command", "run")}
    run(load(flags, os.environ))


def token(options: argparse.Namespace) -> None:
    """`rapid token`."""
    try:
        from rapid_server.auth import hash_token, new_token
        from rapid_server.setting_types import NAME
    except ModuleNotFoundError as error:
        raise _not_installed("token", error) from None
    name: str = options.name
    if not NAME.fullmatch(name):
        raise InputError("NAME", "use 1 to 64 characters of A-Z, a-z, 0-9, '.', '_' and '-'", name)
    new = new_token()
    print(f"line 1: the token of {name}, shown only once; line 2: its entry for the settings", file=sys.stderr)
    print(f"{new}\n{name}:{hash_token(new)}")


def _not_installed(command: str, error: ModuleNotFoundError) -> InputError:
    return InputError("", f"rapid {command} needs {error.name}: pip install -e '.[serve]' in rapid's clone")
