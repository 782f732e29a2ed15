"""The private training loop (Algorithm 2): noisy gradients into Adam, averaged weights out. It sees no loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rapid.config.sections import PrivateSettings
from rapid.dp.mechanism import Losses, PrivateMechanism
from rapid.dp.randomness import randomness_for
from rapid.dp.ranks import Ranks
from rapid.dp.releases import Plan
from rapid.errors import InputError, LostRank
from rapid.progress import Progress
from rapid.runtime import uninterrupted
from rapid.training.checkpoint import Checkpoint
from rapid.training.ema import Ema

MOMENTUM = 0.9
EPSILON_UPDATES = 20
"""How often the epsilon beside the progress bar is computed anew."""


def select_trainable(network: nn.Module, patterns: tuple[str, ...]) -> None:
    """Let the parameters whose names match a pattern (as in file names: `*attentions*`) be trained, and no others.

    Raises:
        InputError: a pattern that matches nothing.
    """
    names = [name for name, _ in network.named_parameters()]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(f"--set private.trainable: no parameter matches '{pattern}'; names are like '{names[0]}'")
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(any(fnmatchcase(name, pattern) for pattern in patterns))


@dataclass(frozen=True)
class _Training:
    """What a step changes, and a checkpoint holds."""

    network: nn.Module
    mechanism: PrivateMechanism
    optimizer: torch.optim.Optimizer
    ema: Ema

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "step": self.mechanism.steps_taken,
            "plan": self.mechanism.plan.model_dump(),
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema.state_dict(),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Go on from what `state` returned.

        Raises:
            InputError: it belongs to another plan.
        """
        if Plan.model_validate(saved["plan"]) != self.mechanism.plan:
            raise InputError(
                "--resume: the checkpoint was made with another plan; use the same epsilon, delta and data"
            )
        self.mechanism.steps_taken = saved["step"]
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.ema.load_state_dict(saved["ema"])

    def step(self, rate: float) -> None:
        """Spend one step, with this learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for parameter, gradient in zip(self.mechanism.parameters, self.mechanism.gradient(), strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.ema.update(self.network)


def train_private(
    network: nn.Module,
    losses: Losses,
    plan: Plan,
    settings: PrivateSettings,
    checkpoint: Path,
    ranks: Ranks | None = None,
    title: str = "private training",
) -> None:
    """Train the parameters of `network` that require gradients, in place, and leave the averaged weights in it.

    Formal guarantee: that of `PrivateMechanism`; optimiser, average and checkpoints are functions of its results. A
    resumed run goes on from the last checkpoint with fresh noise; steps after that checkpoint were never released.

    Args:
        network: the denoiser; all ranks begin with the weights of the first.
        losses: per-example losses by position in this rank's part.
        plan: what is spent.
        settings: optimizer, learning rate, EMA, physical batch, precision, noise source.
        checkpoint: file for the training state, of the first rank; training goes on from it if it is there. The caller
            removes it.
        ranks: the processes that share the work.
        title: shown with the progress.

    Raises:
        InputError: the checkpoint belongs to another plan.
        LostRank: another rank is gone; the state is saved.
    """
    ranks = ranks or Ranks()
    mechanism = PrivateMechanism(
        plan,
        network,
        losses,
        physical_batch=settings.physical_batch,
        autocast=settings.precision == "bfloat16",
        ranks=ranks,
        randomness=randomness_for(settings.noise_source),
    )
    training = _Training(network, mechanism, _optimizer(network, settings), Ema(network, settings.ema_decay))
    saver = Checkpoint(checkpoint, training.state, settings.checkpoint_seconds)
    # the first rank's state is everybody's, so that all hold the same weights
    training.restore(ranks.broadcast_state((saver.load() or training.state()) if ranks.first else {}))
    # no layer of ours has another behaviour in training; eval() makes sure of it
    network.eval()
    try:
        with Progress(title, plan.steps, done=mechanism.steps_taken, shown=ranks.first) as progress:
            while mechanism.steps_taken < plan.steps:
                training.step(learning_rate(settings.learning_rate, mechanism.steps_taken, plan.steps))
                if ranks.first and mechanism.steps_taken % max(1, plan.steps // EPSILON_UPDATES) == 0:
                    progress.note(f"epsilon {plan.epsilon(mechanism.steps_taken):.2f}")
                progress.advance()
                if ranks.first:
                    saver.save_sometimes()
    except (KeyboardInterrupt, LostRank):
        # a step that was begun but not taken counts as taken: it may have been seen
        if ranks.first:
            with uninterrupted():
                saver.save()
        raise
    if ranks.first:
        saver.save()
    training.ema.copy_to(network)


def steps_taken(checkpoint: Path) -> int:
    """Steps that a training's checkpoint holds; 0 if there is none.

    Raises:
        RapidError: the file is damaged.
    """
    saved = Checkpoint(checkpoint, dict).load()
    return 0 if saved is None else int(saved["step"])


def learning_rate(highest: float, step: int, steps: int) -> float:
    """Of step 0..steps-1: a linear rise over a tenth of the steps, at most 10, then half a cosine to a tenth.

    Small steps at the end average the noise.
    """
    rise = min(1.0, (step + 1) / max(1, min(10, steps // 10)))
    return highest * rise * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def _optimizer(network: nn.Module, settings: PrivateSettings) -> torch.optim.Optimizer:
    parameters = [p for p in network.parameters() if p.requires_grad]
    if settings.optimizer == "momentum":
        return torch.optim.SGD(parameters, lr=settings.learning_rate, momentum=MOMENTUM)
    return torch.optim.Adam(parameters, lr=settings.learning_rate)
