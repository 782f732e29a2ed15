"""How many discriminator steps go before a generator step: a fixed number, or adaptive (Section 6.2 of the paper)."""

from __future__ import annotations

from typing import Any

from rapid.methods.dp_gan.settings import DpGanPrivateSettings


class StepController:
    """Counts discriminator steps, and says when the generator is due.

    The adaptive number n_D climbs 1, 2, 5, 10, 20, 50, 100, ... Noise weakens the discriminator; when it no longer
    recognises fakes, the generator learns nothing from it, and more steps in a row restore it. At each generator step
    its accuracy on that step's fakes enters a moving average. When this is at or under the floor, n_D takes the next
    value, but not within 2 / (1 - decay) generator steps of the last move or the start.

    The accuracy is about fakes only, so it is computed from released weights: post-processing, at no privacy cost. That
    on real images would need a release of its own.

    The paper leaves two points open. Here the average starts from the first accuracy, and it continues over moves: in
    the grace period what it had before fades to decay^(2 / (1 - decay)), about 13 %. A move concerns the steps after
    this generator step.

    Args:
        settings: n_D or None, floor and decay.
    """

    def __init__(self, settings: DpGanPrivateSettings) -> None:
        self._fixed = settings.discriminator_steps
        self._floor, self._decay = settings.controller.floor, settings.controller.decay
        self._rung = 0
        self._since_update = 0
        self._since_move = 0
        self._accuracy: float | None = None

    @property
    def discriminator_steps(self) -> int:
        """n_D at present."""
        climbed: int = (1, 2, 5)[self._rung % 3] * 10 ** (self._rung // 3)
        return self._fixed or climbed

    @property
    def accuracy(self) -> float | None:
        """The moving average of the accuracy on fakes; None before the first generator step."""
        return self._accuracy

    def count_step(self) -> bool:
        """Count a discriminator step; return whether a generator step is due."""
        self._since_update += 1
        return self._since_update >= self.discriminator_steps

    def count_update(self, accuracy: float) -> None:
        """Count a generator step.

        Args:
            accuracy: share of its fakes that the discriminator took for fakes.
        """
        self._since_update = 0
        self._since_move += 1
        before = accuracy if self._accuracy is None else self._accuracy
        self._accuracy = self._decay * before + (1 - self._decay) * accuracy
        # 2 / (1 - decay), without its rounding error
        if self._since_move * (1 - self._decay) >= 2 - 1e-9 and self._accuracy <= self._floor:
            self._rung += 1
            self._since_move = 0

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint."""
        return {
            "rung": self._rung,
            "since_update": self._since_update,
            "since_move": self._since_move,
            "accuracy": self._accuracy,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._rung, self._since_update = state_dict["rung"], state_dict["since_update"]
        self._since_move, self._accuracy = state_dict["since_move"], state_dict["accuracy"]
