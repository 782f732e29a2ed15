"""Trained public networks to build on: of a public bundle of the same images, or alone, for other images."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from rapid.bundle.format import Bundle, is_finished
from rapid.errors import InputError

PREFIX = "builtin:"
"""Before the name of networks that ship with rapid."""
SHIPPED = Path(str(resources.files("rapid") / "networks"))


def builtin_names() -> list[str]:
    """Names of the networks that ship with rapid, sorted."""
    return sorted(path.name for path in SHIPPED.iterdir() if is_finished(path)) if SHIPPED.is_dir() else []


def open_networks(path: Path) -> Bundle:
    """Open a public bundle, or networks alone.

    Args:
        path: a folder, or `builtin:NAME`.

    Raises:
        InputError: no such networks, damaged, or a private bundle.
    """
    if str(path).startswith(PREFIX):
        name = str(path).removeprefix(PREFIX)
        if name not in builtin_names():
            known = ", ".join(PREFIX + one for one in builtin_names())
            raise InputError("networks", f"unknown; rapid ships {known or 'none'}", path)
        path = SHIPPED / name
    return Bundle.open(path, "networks", "public", "networks")


def check_same_images(networks: Bundle, fingerprint: str) -> None:
    """Refuse a public bundle of other images: what it holds of them must not get into the new bundle.

    Raises:
        InputError: made from other images.
    """
    public = networks.config.public
    if networks.config.kind == "public" and (public is None or public.fingerprint != fingerprint):
        problem = "was trained on other images; give the same --public, or leave it out"
        raise InputError("networks", problem, networks.path)
