"""Networks in folders: `config.json` and safetensors weights, in files that are called as in diffusers."""

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
    """A network that is built from `config` alone, and saved to and loaded from a folder.

    Args:
        config: JSON-ready; the only argument of a subclass's constructor.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load a saved network, in evaluation mode.

        Raises:
            InputError: files are missing, damaged or of another network.
        """
        network = cls(_read_config(folder))
        try:
            network.load_state_dict(load_file(folder / WEIGHTS))
        except (OSError, SafetensorError, RuntimeError):
            problem = "the weights are missing, damaged or of another network; copy the bundle again"
            raise InputError("", problem, folder) from None
        return network.eval()

    def save(self, folder: Path) -> None:
        """Write `config.json` and the weights to a folder, which is created if necessary."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: tensor.cpu().contiguous() for name, tensor in self.state_dict().items()}, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        # safetensors makes its files readable by the owner only; give them the mode of the other files
        shutil.copymode(folder / CONFIG, folder / WEIGHTS)


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError("", f"{CONFIG} is missing or damaged; copy the bundle again", folder) from None
    return config
