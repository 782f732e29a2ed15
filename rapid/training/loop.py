"""The training loop of the public networks: Adam, warm-up and cosine, EMA, resumable."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rapid.config.sections import Training
from rapid.progress import Progress
from rapid.training.checkpoint import Checkpoint
from rapid.training.ema import Ema

Loss = Callable[[torch.Generator], Tensor]
"""Draws a batch with the given generator and returns its loss, a scalar."""


def train(title: str, network: nn.Module, loss: Loss, settings: Training, checkpoint: Path) -> None:
    """Train `network` in place and leave the averaged weights in it.

    The generator of step n is seeded by n, so that a resumed run draws what an uninterrupted one would have drawn.

    Args:
        title: shown with the progress.
        network: its parameters that require gradients are trained.
        loss: see `Loss`; draws on the CPU generator that it is given.
        settings: steps, learning rate, warm-up, EMA.
        checkpoint: file for the state; training goes on from it if it is there. The caller removes it.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=settings.learning_rate)
    ema = Ema(network, settings.ema_decay)
    done = 0

    def state() -> dict[str, Any]:
        return {
            "step": done,
            "network": network.state_dict(),
            "optimizer": optimizer.state_dict(),
            "ema": ema.state_dict(),
        }

    saver = Checkpoint(checkpoint, state)
    if (saved := saver.load()) is not None:
        done = saved["step"]
        network.load_state_dict(saved["network"])
        optimizer.load_state_dict(saved["optimizer"])
        ema.load_state_dict(saved["ema"])
    network.train()
    try:
        with Progress(title, settings.steps, done=done) as progress:
            while done < settings.steps:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(settings, done)
                value = loss(torch.Generator().manual_seed(done))
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                ema.update(network)
                done += 1
                if done % 10 == 0:
                    progress.note(f"loss {value.item():.4f}")
                progress.advance()
                saver.save_sometimes()
    except KeyboardInterrupt:
        saver.save()
        raise
    saver.save()
    ema.copy_to(network)
    network.eval()


def learning_rate(settings: Training, step: int) -> float:
    """Learning rate of step 0..steps-1: a linear rise over `warmup_steps`, then half a cosine down to 0."""
    warmup = min(settings.warmup_steps, settings.steps // 2)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    share = (step - warmup) / max(1, settings.steps - warmup)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * share))
