"""Training of a public network by a plain loss: warm-up and cosine, weight average, resumable."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from rapid.config.sections import Training
from rapid.errors import InputError
from rapid.precision import exact_float32
from rapid.ranks import Ranks
from rapid.training.checkpoint import Checkpoint
from rapid.training.gradient_sum import GradientSum
from rapid.training.loop import Trainer, warmup_cosine
from rapid.training.loss import Loss, LossGradient
from rapid.training.optimizers import on_gpu
from rapid.training.sam import backward_sharp

SHOWN_EVERY = 10


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
    ranks: Ranks | None = None,
) -> None:
    """Train `network` in place and leave the averaged weights in it, in evaluation mode.

    The generator of step n is seeded by n, so a resumed run makes the same draws as an uninterrupted run. The result
    does not depend on the number of ranks, except for the rounding of sums.

    Args:
        title: shown with the progress.
        network: its parameters that require gradients are trained.
        loss: see `Loss`.
        settings: steps, learning rate, warm-up, average.
        checkpoint: training continues from its state if there is one; that of the first rank counts.
        optimizer: of those parameters; default: Adam.
        rho: radius of sharpness-aware minimisation (see `rapid.training.sam`); 0: without it.
        exact: float32 whatever `settings.precision` says, with all of its digits, for losses that shorter products
            would blur.
        ranks: the processes that share each batch, if the loss is made for it; without them, each process trains alone.

    Raises:
        InputError: the batch is smaller than the number of ranks.
        LostRank: another rank is gone; the last checkpoint remains.
        Stopped: a stop was requested; the state is saved.
    """
    ranks = ranks or Ranks()
    if settings.batch_size < ranks.count:
        error = InputError("batch_size", f"is less than the {ranks.count} processes; start fewer", settings.batch_size)
        error.reported = not ranks.first
        raise error
    parameters = [p for p in network.parameters() if p.requires_grad]
    precision = "float32" if exact else settings.precision
    optimizer = optimizer or torch.optim.Adam(parameters, lr=settings.learning_rate, fused=on_gpu(parameters))
    warmup_steps = min(settings.warmup_steps, settings.steps // 2)
    scheduler = warmup_cosine(optimizer, settings.steps, warmup_steps=warmup_steps)
    trainer = Trainer(network, optimizer, scheduler, ema_decay=settings.ema_decay)
    saved = checkpoint.load()
    if ranks.count > 1:
        saved = ranks.broadcast_state(saved or trainer.state_dict())
    if saved is not None:
        trainer.load_state_dict(saved)
    add_up, gradient = GradientSum(ranks), LossGradient(loss, parameters, precision)

    def backward(step: int) -> str | None:
        batch = loss.draw(torch.Generator().manual_seed(step))
        value = backward_sharp(parameters, lambda: gradient(batch), rho, add_up)
        return f"loss {value.item():.4f}" if (step + 1) % SHOWN_EVERY == 0 else None

    network.train()
    own = checkpoint if ranks.first else None
    with exact_float32() if exact else nullcontext():
        trainer.run(settings.steps, backward, title=title, checkpoint=own, check=add_up.check_stop)
    network.eval()
