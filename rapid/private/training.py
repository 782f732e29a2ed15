"""The private training loop (Algorithm 2): noisy gradients into Adam, averaged weights out. It sees no loss."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rapid.checkpoint import Checkpoint
from rapid.config import PrivateSettings
from rapid.errors import InputError
from rapid.models.ema import Ema
from rapid.private.mechanism import Losses, PrivateMechanism
from rapid.private.plan import Plan
from rapid.progress import Progress

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


def train_private(network: nn.Module, losses: Losses, plan: Plan, settings: PrivateSettings, checkpoint: Path) -> None:
    """Train the parameters of `network` that require gradients, in place, and leave the averaged weights in it.

    Formal guarantee: that of `PrivateMechanism`; optimiser, average and checkpoints are functions of its results. A
    resumed run goes on from the last checkpoint with fresh noise; steps after that checkpoint were never released.

    Args:
        network: the denoiser.
        losses: per-example losses by index.
        plan: what is spent.
        settings: learning rate, EMA, physical batch.
        checkpoint: file for the training state; training goes on from it if it is there. The caller removes it.
    """
    optimizer = torch.optim.Adam([p for p in network.parameters() if p.requires_grad], lr=settings.learning_rate)
    ema = Ema(network, settings.ema_decay)
    mechanism = PrivateMechanism(plan, network, losses, physical_batch=settings.physical_batch)

    def state() -> dict[str, Any]:
        return {
            "step": mechanism.steps_taken,
            "plan": plan.model_dump(),
            "network": network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "ema": ema.state_dict(),
        }

    saver = Checkpoint(checkpoint, state)
    if (saved := saver.load()) is not None:
        if Plan.model_validate(saved["plan"]) != plan:
            raise InputError(
                "--resume: the checkpoint was made with another plan; use the same epsilon, delta and data"
            )
        mechanism.steps_taken = saved["step"]
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        ema.load_state_dict(saved["ema"])
    # no layer of ours has another behaviour in training; eval() makes sure of it
    network.eval()
    try:
        with Progress("private training", plan.steps, done=mechanism.steps_taken) as progress:
            while mechanism.steps_taken < plan.steps:
                for parameter, gradient in zip(mechanism.parameters, mechanism.gradient(), strict=True):
                    parameter.grad = gradient
                optimizer.step()
                ema.update(network)
                if mechanism.steps_taken % max(1, plan.steps // EPSILON_UPDATES) == 0:
                    progress.note(f"epsilon {plan.epsilon(mechanism.steps_taken):.2f}")
                progress.advance()
                saver.save_sometimes()
    except KeyboardInterrupt:
        saver.save()
        raise
    saver.save()
    ema.copy_to(network)
