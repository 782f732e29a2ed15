"""A finished public bundle whose networks another one takes over, where its settings would train the same ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rapid.bundle.format import Bundle, PublicData
from rapid.config.sections import Settings
from rapid.errors import InputError
from rapid.files import replacing

_IMAGES = ("image", "split")
_SHOWN = (*_IMAGES, "augmentations.training", "augmentations.augment", "autoencoder")
DEPENDS = {
    "autoencoder": _SHOWN,
    "denoiser": (*_SHOWN, "schedule", "denoiser"),
    "encoder": (*_SHOWN, "schedule", "denoiser", "encoder", "retrieval.k"),
    "probe": (*_IMAGES, "probe"),
}
"""The settings on which each network of the public stage depends."""


class Donor:
    """Gives copies of its networks.

    Args:
        path: a finished public bundle, made from the same images.
        data: what the new bundle is made from.

    Raises:
        InputError: no such bundle, or one of other images.
    """

    def __init__(self, path: Path, data: PublicData) -> None:
        self._bundle = Bundle.open(path, "--networks", "public")
        own = self._bundle.config.public
        # views are drawn from each set alike, so into how many sets the same images are divided matters
        if (own.fingerprint, len(own.sources)) != (data.fingerprint, len(data.sources)):
            raise InputError(
                f"--networks {path}: was trained on other images; give the same --public, or leave --networks out"
            )

    def give(self, name: str, settings: Settings, target: Path) -> bool:
        """Copy the network `name` to the new folder `target`, if it is what `settings` would train; says whether."""
        if name not in self._bundle.config.networks:
            return False
        have, wanted = (one.model_dump(mode="json") for one in (self._bundle.settings, settings))
        if any(_part(have, section) != _part(wanted, section) for section in DEPENDS[name]):
            return False
        with replacing(target) as copy:
            shutil.copytree(self._bundle.path / name, copy)
        return True


def _part(settings: dict[str, Any], name: str) -> Any:
    found: Any = settings
    for key in name.split("."):
        found = found[key]
    return found
