"""The files of a bundle and their hashes, to which a report is bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rapid.bundle import Bundle
from rapid.bundle.components import MANIFEST, listed_files
from rapid.bundle.format import CARD, CONFIG, INDEX, PRIVACY
from rapid.files import content_hash

STATE = "checkpoints"
"""Training state: no part of what is released, and not looked at."""
OWN = (CONFIG, INDEX, PRIVACY, CARD)


@dataclass(frozen=True)
class Contents:
    """The files of a bundle, without `checkpoints/`.

    Attributes:
        hashes: sha256 (hex) of each of its own files, by path relative to the bundle.
        foreign: number of other files and links. They are neither named nor hashed: they may be private.
        has_state: whether there is a folder `checkpoints`.
    """

    hashes: dict[str, str]
    foreign: int
    has_state: bool


def contents(bundle: Bundle) -> Contents:
    """Hash the files of a bundle that was opened, so that its components are known to be those of `config.json`."""
    listed = {name: _listed(bundle.path / name) for name in bundle.config.components}
    found, foreign = {}, 0
    for name, path in _files(bundle.path):
        if not path.is_file() or path.is_symlink() or not _is_own(name, listed):
            foreign += 1
            continue
        digest = content_hash(path)
        folder, _, inside = name.partition("/")
        expected = (listed.get(folder) or {}).get(inside)
        if expected not in (None, digest):
            foreign += 1
            continue
        found[name] = digest
    return Contents(found, foreign, (bundle.path / STATE).exists())


def differences(recorded: Mapping[str, str], folder: Path) -> tuple[list[str], int]:
    """What distinguishes a bundle from that of a report.

    Args:
        recorded: `Contents.hashes` of the report.
        folder: of the bundle.

    Returns:
        The recorded files that are changed or missing, and the number of other files.
    """
    present = dict(_files(folder))
    changed = [
        name
        for name, digest in sorted(recorded.items())
        if name not in present or not present[name].is_file() or content_hash(present[name]) != digest
    ]
    return changed, len(present.keys() - recorded.keys())


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Everything but folders and training state, by relative path."""
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if parts[0] != STATE and (path.is_symlink() or not path.is_dir()):
            yield "/".join(parts), path


def _listed(component: Path) -> dict[str, str | None] | None:
    """Hash by name of the files that a component's manifest lists; None without one: `component_hash` has them all."""
    manifest = component / MANIFEST
    if not manifest.is_file():
        return None
    return {MANIFEST: None, **listed_files(manifest)}


def _is_own(name: str, listed: Mapping[str, Mapping[str, str | None] | None]) -> bool:
    # hidden files are in no component's hash, so anything could be in them
    if any(part.startswith(".") for part in name.split("/")):
        return False
    folder, separator, inside = name.partition("/")
    if not separator:
        return name in OWN
    if folder not in listed:
        return False
    files = listed[folder]
    return files is None or inside in files
