"""Weights and configuration of one network in a folder: `config.json` and safetensors, as diffusers lays them out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from rapid.errors import InputError

CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"


class StoredNetwork(nn.Module):
    """A network that its `config` rebuilds, in a folder with `config.json` and the weights.

    Args:
        config: JSON-ready; the only argument of the subclass.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def load(cls, folder: Path) -> Self:
        """A saved network, in evaluation mode.

        Raises:
            InputError: missing or damaged files, or those of another network.
        """
        network = cls(_read_config(folder))
        try:
            network.load_state_dict(load_file(folder / WEIGHTS))
        except (OSError, SafetensorError, RuntimeError):
            raise InputError(
                f"{folder}: the weights are missing, damaged or of another network; copy the bundle again"
            ) from None
        return network.eval()

    def save(self, folder: Path) -> None:
        """Write `config.json` and the weights into an existing or new folder."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        # safetensors lets nobody else read its files; whoever may read the rest of the bundle may read them
        shutil.copymode(folder / CONFIG, folder / WEIGHTS)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{folder}: {CONFIG} is missing or damaged; copy the bundle again") from None
    return config
