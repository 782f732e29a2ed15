"""How a private training runs, apart from what it releases."""

from __future__ import annotations

from dataclasses import dataclass

from rapid.config.sections import DpSgdSettings


@dataclass(frozen=True)
class Execution:
    """How a private training runs. None of this changes what is released, but for rounding.

    Attributes:
        physical_batch: losses in memory at a time; None: measured (see `rapid.dp.physical`).
        autocast: run the network in bfloat16; norms, sums and noise stay float64.
        checkpoint_seconds: seconds between two checkpoints, at least (see `rapid.training.checkpoint.pause_seconds`).
        noise_source: of `rapid.dp.randomness.NOISE_SOURCES`.
        pad_batches: compute as many gradients in each step, whatever is drawn; see `rapid.dp.padding`.
    """

    physical_batch: int | None = 256
    autocast: bool = False
    checkpoint_seconds: float = 60.0
    noise_source: str = "chacha20"
    pad_batches: bool = False

    @classmethod
    def of(cls, settings: DpSgdSettings) -> Execution:
        """As the settings of a method's private stage say."""
        autocast = settings.precision == "bfloat16"
        return cls(
            settings.physical_batch if isinstance(settings.physical_batch, int) else None,
            autocast,
            settings.checkpoint_seconds,
            settings.noise_source,
            settings.pad_batches,
        )
