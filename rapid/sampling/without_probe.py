"""What samplers have in common that know neither a probe nor a knowledge base."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Never

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rapid.errors import InputError


class WithoutProbe(ABC):
    """Part of `rapid.sampling.generator.Sampler`: every candidate is an image, and none has a record."""

    attempts = 1
    probed = False
    confidence = 0.0
    records = 0

    @abstractmethod
    def decode(self, latents: Tensor) -> NDArray[np.uint8]:
        """See the protocol."""

    def label(self, images: NDArray[np.uint8]) -> None:
        """None: there is no probe."""
        return

    def finish(self, latents: Tensor) -> tuple[NDArray[np.uint8], None]:
        """Images alone: there is no probe."""
        return self.decode(latents), None

    def record_images(self, records: NDArray[np.int64]) -> Never:
        """There is no knowledge base.

        Raises:
            InputError: always; the field is "record".
        """
        raise InputError("record", "this model has no knowledge base", records.tolist()[0])
