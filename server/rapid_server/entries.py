"""What stands in the lists of the settings: bundles, tokens, origins.

Each function raises ValueError that says what should be there; nothing of a token is in its message.
"""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path

from pydantic import SecretStr

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""What clients and bundles may be called."""

_HASH = re.compile(r"[0-9a-f]{64}")
_ORIGIN = re.compile(r"https?://[^/?#@\s]+")


def split_list(value: object) -> object:
    """A list from text, by commas or as JSON; what is not text as it is."""
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("["):
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        # not the error's own words: they may quote a token
        raise ValueError("begins like a JSON list, and is none") from None


def split_model(entry: str) -> tuple[str, Path]:
    """Split `NAME=DIR`; of `DIR` alone the name is the folder's. One with an equals sign is written `./a=b`."""
    name, separator, folder = entry.partition("=")
    if not separator or "/" in name:
        folder = entry
        try:
            name = Path(folder).resolve().name  # of the folder that a link leads to, as in `rapid info`
        except (OSError, RuntimeError):
            raise ValueError("its links lead in a circle") from None
    if not folder:
        raise ValueError("should be DIR or NAME=DIR")
    if not NAME.fullmatch(name) or set(name) == {"."}:
        raise ValueError("write NAME=DIR, with a name of 1 to 64 of A-Z, a-z, 0-9, '.', '_' and '-'")
    return name, Path(folder)


def split_token(entry: SecretStr) -> tuple[str, str]:
    """Split `NAME:HASH`, the line that `rapid token NAME` prints."""
    name, _, digest = entry.get_secret_value().partition(":")
    if not (NAME.fullmatch(name) and _HASH.fullmatch(digest)):
        raise ValueError("should be NAME:HASH, the line that `rapid token NAME` prints; not the token itself")
    return name, digest


def check_origin(entry: str) -> str:
    """An origin as browsers send it, or `*` for all."""
    if entry != "*" and not _ORIGIN.fullmatch(entry):
        raise ValueError("should be an origin such as https://example.org, without a path or a slash at its end, or *")
    return entry


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name other than localhost is taken to be reached from elsewhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
