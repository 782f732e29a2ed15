"""Setup of the process: device, precision."""

from __future__ import annotations

import os
from typing import TypeVar

import torch

from rapid.errors import InputError

Network = TypeVar("Network", bound=torch.nn.Module)


def process_rank() -> int:
    """The rank of this process under torchrun; 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def choose_device(name: str) -> torch.device:
    """The device named "auto", "cpu" or "cuda". With several GPUs it is the one of this process's local rank.

    Raises:
        InputError: an unknown name, CUDA is not available, or there are more processes than GPUs.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise InputError("device", "choose auto, cpu or cuda", name)
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device", "CUDA is not available on this machine or in this build of torch; use cpu", name)
    if name == "cpu":
        return torch.device(name)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise InputError("device", f"there are {torch.cuda.device_count()} GPUs; start at most as many processes", name)
    # what names no device, such as a new stream, is on this one
    torch.cuda.set_device(local)
    return torch.device(name, local)


def place(network: Network, device: torch.device) -> Network:
    """Move a network to a device in channels-last layout, in which convolutions take half the time, in place.

    A network that is trained privately afterwards may keep this layout: the clipped sums of `rapid.dp.gradients` are
    the same in it: `tests/dp/test_dp_gradients_unets.py` compares them with a loop over single examples. Those of
    Opacus are not.
    """
    placed: Network = network.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    return placed


def autocast(precision: str, device: torch.device) -> torch.autocast:
    """Matrix products and convolutions in bfloat16 where `precision` asks for it, in a forward pass.

    Args:
        precision: "float32", "bfloat16" or "auto": bfloat16 on GPUs that have it.
        device: of the network.
    """
    enabled = precision == "bfloat16"
    if precision == "auto" and device.type == "cuda":
        enabled = torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)
