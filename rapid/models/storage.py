"""Weights and configuration of one network in a folder: `config.json` and safetensors, as diffusers lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from rapid.errors import InputError

CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model.safetensors"


def save_network(network: nn.Module, config: dict[str, Any], folder: Path) -> None:
    """Write the weights and the `config` that rebuilds the network into an existing or new folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in network.state_dict().items()}, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a saved network.

    Raises:
        InputError: missing or damaged.
    """
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{folder}: {CONFIG} is missing or damaged; copy the bundle again") from None
    return config


def load_weights(network: nn.Module, folder: Path) -> None:
    """Load the weights of a saved network into one of the same shape, in place.

    Raises:
        InputError: missing, damaged or of another network.
    """
    try:
        network.load_state_dict(load_file(folder / WEIGHTS))
    except (OSError, SafetensorError, RuntimeError):
        raise InputError(
            f"{folder}: the weights are missing, damaged or of another network; copy the bundle again"
        ) from None
