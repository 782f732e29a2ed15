"""The probe of a private bundle by itself; a `rapid.sampling.classifier.Classifier`."""

from __future__ import annotations

import torch

from rapid.bundle import Bundle
from rapid.probe.network import COMPONENT, Probe
from rapid.runtime import place
from rapid.sampling.classifier import NetworkClassifier


class ProbeClassifier(NetworkClassifier):
    """Probabilities of the private classes by the probe, which also selects the images of the bundle.

    Args:
        bundle: a private bundle with a probe.
        device: where the probe runs.
    """

    def __init__(self, bundle: Bundle, device: torch.device) -> None:
        super().__init__(bundle, bundle.classes, device, place(bundle.component(COMPONENT, Probe), device))
