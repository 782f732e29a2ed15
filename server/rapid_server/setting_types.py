"""Parsing and checking the entries of list settings: bundles, tokens, origins.

Each function raises ValueError with the expected form; the message never contains any part of a token.
"""

from __future__ import annotations

import ipaddress
import json
import re
from pathlib import Path

from pydantic import SecretStr

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Valid names of clients and models."""

_HASH = re.compile(r"[0-9a-f]{64}")
ANY_HOST = "*"
_HOST = re.compile(r"\*|[^*/?#@:\s\[\]]+")
_ORIGIN = re.compile(r"https?://[^/?#@\s]+")


def split_list(value: object) -> object:
    """Split text at commas, or parse it if it is a JSON list; return anything else unchanged."""
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("["):
        return [part.strip() for part in value.split(",") if part.strip()]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        # without the parser's message, which may quote a token
        raise ValueError("starts like a JSON list, but is not valid JSON") from None


def split_model(entry: str) -> tuple[str, Path]:
    """Split `NAME=DIR`; the name of `DIR` alone is the folder's. Write a folder with an equals sign as `./a=b`."""
    name, separator, folder = entry.partition("=")
    if not separator or "/" in name:
        folder = entry
        try:
            # the target of a link, as in `rapid info`
            name = Path(folder).resolve().name
        except (OSError, RuntimeError):
            raise ValueError("its links form a circle") from None
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
    """Accept an origin as browsers send it, or `*` for all."""
    if entry != "*" and not _ORIGIN.fullmatch(entry):
        raise ValueError("should be an origin such as https://example.org, without a path or a slash at its end, or *")
    return entry


def check_host(entry: str) -> str:
    """Accept a host name or an address, without a port, or `ANY_HOST` for all; return it in lower case."""
    host = entry.lower().removeprefix("[").removesuffix("]")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        if _HOST.fullmatch(host):
            return host
    raise ValueError("should be a name or an address such as images.example.org, without http:// and port, or *")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; of all names, only localhost counts."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
