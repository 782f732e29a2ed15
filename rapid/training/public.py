"""Training of a public network by a plain loss: warm-up and cosine, weight average, resumable."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rapid.config.sections import Training
from rapid.runtime import autocast
from rapid.training.checkpoint import Checkpoint
from rapid.training.loop import Trainer, warmup_cosine
from rapid.training.sam import backward_sharp

SHOWN_EVERY = 10
Loss = Callable[[torch.Generator], Tensor]
"""Draws a batch with the given generator and returns its loss, a scalar."""


def train(
    title: str,
    network: nn.Module,
    loss: Loss,
    settings: Training,
    checkpoint: Checkpoint,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    rho: float = 0.0,
    exact: bool = False,
) -> None:
    """Train `network` in place and leave the averaged weights in it, in evaluation mode.

    The generator of step n is seeded by n, so a resumed run makes the same draws as an uninterrupted run.

    Args:
        title: shown with the progress.
        network: its parameters that require gradients are trained.
        loss: see `Loss`; draws from the CPU generator that it gets.
        settings: steps, learning rate, warm-up, average.
        checkpoint: training continues from its state if there is one.
        optimizer: of those parameters; default: Adam.
        rho: radius of sharpness-aware minimisation (see `rapid.training.sam`); 0: without it.
        exact: float32 whatever `settings.precision` says, for losses that bfloat16 would blur.

    Raises:
        Stopped: a stop was requested; the state is saved.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    precision = "float32" if exact else settings.precision
    optimizer = optimizer or torch.optim.Adam(parameters, lr=settings.learning_rate)
    warmup_steps = min(settings.warmup_steps, settings.steps // 2)
    scheduler = warmup_cosine(optimizer, settings.steps, warmup_steps=warmup_steps)
    trainer = Trainer(network, optimizer, scheduler, ema_decay=settings.ema_decay)
    if (saved := checkpoint.load()) is not None:
        trainer.load_state_dict(saved)

    def backward(step: int) -> str | None:
        def forward() -> Tensor:
            with autocast(precision, parameters[0].device):
                return loss(torch.Generator().manual_seed(step))

        value = backward_sharp(parameters, forward, rho)
        return f"loss {value.item():.4f}" if (step + 1) % SHOWN_EVERY == 0 else None

    network.train()
    trainer.run(settings.steps, backward, title=title, checkpoint=checkpoint)
    network.eval()
