"""Exponential moving average of a network's weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Ema:
    """Average of the weights after each step, with a decay that rises to `decay`: min(decay, (1 + n) / (10 + n)).

    Without that rise the random initial weights would still weigh decay^n after n steps.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.decay = decay
        self.steps = 0
        self.weights = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """Take in the weights after one more step."""
        self.steps += 1
        rate = 1 - min(self.decay, (1 + self.steps) / (10 + self.steps))
        for name, tensor in network.state_dict().items():
            if tensor.is_floating_point():
                self.weights[name].lerp_(tensor, rate)
            else:
                self.weights[name].copy_(tensor)

    def copy_to(self, network: nn.Module) -> None:
        """Put the averaged weights into the network."""
        network.load_state_dict(self.weights)

    def state_dict(self) -> dict[str, int | dict[str, Tensor]]:
        """For checkpoints."""
        return {"steps": self.steps, "weights": self.weights}

    def load_state_dict(self, state: dict[str, int | dict[str, Tensor]]) -> None:
        """Go on from a checkpoint."""
        steps, weights = state["steps"], state["weights"]
        assert isinstance(steps, int)
        assert isinstance(weights, dict)
        self.steps = steps
        for name, tensor in weights.items():
            self.weights[name].copy_(tensor)
