"""The training loop of all networks of rapid, public and private."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from rapid.errors import Stopped
from rapid.mapped import release
from rapid.progress import Progress
from rapid.stopping import check_stop
from rapid.training.average import WeightAverage
from rapid.training.checkpoint import Checkpoint

Backward = Callable[[int], str | None]
"""Step from 0 -> text to show with the progress, or None; fills `.grad` of the trained parameters."""


class Stateful(Protocol):
    """Anything with a state that checkpoints can hold, such as an optimiser."""

    def state_dict(self) -> Any:
        """The state, for a checkpoint."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Continue from a checkpoint."""


class Trainer:
    """Runs the steps of one training, which can be stopped between any two steps and resumed.

    The state is saved only after whole steps: `check` is called between steps, never within one. An exception
    within a step saves nothing, so the last checkpoint remains.

    Args:
        network: its parameters are trained in place.
        optimizer: of the trained parameters.
        scheduler: of the learning rate; takes one step after each step of the optimiser.
        ema_decay: largest decay of the weight average that `run` leaves in the network; None: no average.
        extra: other parts of the state, by name, such as a GAN's generator and its optimiser.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler,
        *,
        ema_decay: float | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> None:
        self.network = network
        self.optimizer = optimizer
        self.steps_done = 0
        self._average = None if ema_decay is None else WeightAverage(network, ema_decay)
        self._parts: dict[str, Stateful] = {"network": network, "optimizer": optimizer, "scheduler": scheduler}
        if self._average is not None:
            self._parts["average"] = self._average
        self._scheduler = scheduler
        self._parts |= {f"extra.{name}": part for name, part in (extra or {}).items()}

    def state_dict(self) -> dict[str, Any]:
        """The whole state, for a checkpoint."""
        return {"step": self.steps_done} | {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self.steps_done = state["step"]

    def run(
        self,
        steps: int,
        backward: Backward,
        *,
        title: str,
        checkpoint: Checkpoint | None = None,
        between_steps: Callable[[int], None] | None = None,
        shown: bool = True,
        pause_every: int = 1,
        check: Callable[[], None] = check_stop,
    ) -> None:
        """Take the remaining steps up to `steps`, then put the averaged weights into the network.

        Args:
            steps: total number, including those of earlier runs.
            backward: see `Backward`.
            title: shown with the progress.
            checkpoint: where the state is saved; None: nowhere.
            between_steps: called after each step with the number of steps done, such as a GAN's generator step.
            shown: whether progress is shown.
            pause_every: the training stops, and its state is saved, only after a multiple of so many steps.
            check: raises Stopped before a step if it is not to be taken, such as `GradientSum.check_stop`.

        Raises:
            Stopped: a stop was requested; the state after the last whole step is saved.
        """

        def save() -> None:
            if checkpoint is not None:
                checkpoint.save(self.state_dict())

        with Progress(title, steps, done=self.steps_done, shown=shown) as progress:
            while self.steps_done < steps:
                try:
                    if self.steps_done % pause_every == 0:
                        check()
                except Stopped:
                    save()
                    raise
                self.step(backward, progress)
                if between_steps is not None:
                    between_steps(self.steps_done)
                release()
                progress.advance()
                if checkpoint is not None and self.steps_done % pause_every == 0:
                    checkpoint.save_if_due(self.state_dict)
        save()
        self.use_average()

    def step(self, backward: Backward, progress: Progress | None = None) -> None:
        """Take one step; `steps_done` increases once it is complete."""
        self.optimizer.zero_grad()
        note = backward(self.steps_done)
        self.optimizer.step()
        self._scheduler.step()
        if self._average is not None:
            self._average.update_parameters(self.network)
        self.steps_done += 1
        if note is not None and progress is not None:
            progress.note(note)

    def use_average(self) -> None:
        """Put the averaged weights into the network, if there is an average and it has seen a step."""
        if self._average is not None and self.steps_done:
            self.network.load_state_dict(self._average.module.state_dict())


def warmup_cosine(
    optimizer: torch.optim.Optimizer, steps: int, *, warmup_steps: int, final_share: float = 0.0
) -> LambdaLR:
    """Linear warm-up of the learning rate over `warmup_steps`, then half a cosine down to `final_share` of it."""

    def share(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
        return final_share + (1 - final_share) * 0.5 * (1 + math.cos(math.pi * done))

    return LambdaLR(optimizer, share)
