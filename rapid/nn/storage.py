"""Networks in folders: `config.json` and safetensors weights, in files that are called as in diffusers."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from rapid.errors import DENIED, InputError

CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"
OS_ERROR = re.compile(r"\(os error ([0-9]+)\)")


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
            # safetensors calls a file missing that may not be read
            with (folder / WEIGHTS).open("rb"):
                network.load_state_dict(load_file(folder / WEIGHTS))
        except PermissionError:
            raise InputError("", DENIED, folder / WEIGHTS) from None
        except (OSError, SafetensorError, RuntimeError):
            problem = "the weights are missing, damaged or of another network; copy the bundle again"
            raise InputError("", problem, folder) from None
        return network.eval()

    def save(self, folder: Path) -> None:
        """Write `config.json` and the weights to a folder, which is created if necessary.

        Raises:
            OSError: they cannot be written, for example because the disk is full.
        """
        folder.mkdir(parents=True, exist_ok=True)
        write_weights(self, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        # safetensors makes its files readable by the owner only; give them the mode of the other files
        shutil.copymode(folder / CONFIG, folder / WEIGHTS)


def write_weights(network: nn.Module, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write the weights of a network to a safetensors file.

    Args:
        network: in whose `state_dict` they are.
        path: the file.
        metadata: stored with them.

    Raises:
        OSError: they cannot be written, for example because the disk is full.
    """
    weights = {name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()}
    try:
        save_file(weights, path, metadata)
    except SafetensorError as error:
        # it has the system's error in its text alone
        found = OS_ERROR.search(str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from None


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except PermissionError:
        raise InputError("", DENIED, folder / CONFIG) from None
    except (OSError, ValueError):
        raise InputError("", f"{CONFIG} is missing or damaged; copy the bundle again", folder) from None
    return config
