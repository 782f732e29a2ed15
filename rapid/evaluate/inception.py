"""FID, Inception Score, precision and recall as DPImageBench (CCS 2025) measures them.

The network is the Inception network of pytorch-fid: images are scaled to 299x299 bilinearly without aligned corners and
to [-1, 1]; its layers are built by torch-fidelity, whose blocks are the same, and whose own scaling is that of
TensorFlow 1, which is left out. The weights (`...inception-2015-12-05-6726825d.pth`) are published with pytorch-fid and
with torch-fidelity and are not part of rapid; the user gives their path.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.errors import InputError
from rapid.progress import Progress

BATCH = 50
FEATURES = 2048
SIDE = 299
LAYERS = (
    "Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "MaxPool_1", "Conv2d_3b_1x1", "Conv2d_4a_3x3", "MaxPool_2",
    "Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e",
    "Mixed_7a", "Mixed_7b", "Mixed_7c", "AvgPool",
)  # fmt: skip
"""Of torch-fidelity's network, in the order of its computation."""


class Inception(nn.Module):
    """pytorch-fid's Inception network.

    Args:
        library: torch-fidelity's network with the weights.
    """

    def __init__(self, library: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(library.get_submodule(name) for name in LAYERS))
        self.fc = library.get_submodule("fc")

    def forward(self, images: Tensor) -> Tensor:
        """Features of the last pooling layer, float32 (N, 2048), of images uint8 (N, 3, H, W)."""
        x = F.interpolate(images.float().div(255), size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        features: Tensor = self.layers(2 * x - 1).flatten(1)
        return features


def inception_class() -> Any:
    """torch-fidelity's `FeatureExtractorInceptionV3`.

    Raises:
        InputError: torch-fidelity is not installed.
    """
    spec = importlib.util.find_spec("torch_fidelity")
    if spec is None:
        raise InputError("inception", "needs torch-fidelity: pip install --no-deps torch-fidelity")
    # Its __init__ imports every extractor, some of which need torchvision, which rapid does not depend on. So the
    # package is created without running its __init__, and only the Inception module is imported.
    sys.modules.setdefault("torch_fidelity", importlib.util.module_from_spec(spec))
    return importlib.import_module("torch_fidelity.feature_extractor_inceptionv3").FeatureExtractorInceptionV3


def load_inception(path: Path, device: torch.device) -> Inception:
    """Load the Inception network with weights from `path`, in evaluation mode.

    Raises:
        InputError: torch-fidelity is not installed, or the file does not contain its weights.
    """
    extractor = inception_class()
    if not path.is_file():
        raise InputError("inception", "is not a file; give the weights published by pytorch-fid", path)
    try:
        # the extractor unpickles the file without restrictions, so check first that it contains only tensors
        torch.load(path, map_location="cpu", weights_only=True)
        network = Inception(extractor("inception-v3-compat", [str(FEATURES)], str(path)))
    except (RuntimeError, ValueError, EOFError, TypeError, AttributeError, pickle.UnpicklingError):
        problem = "does not contain the weights of pytorch-fid's Inception network; download them again"
        raise InputError("inception", problem, path) from None
    return network.to(device).eval()


@torch.no_grad()
def inception_features(
    network: Inception, images: NDArray[np.uint8], device: torch.device, title: str
) -> NDArray[np.float32]:
    """Features of the last pooling layer, float32 (N, 2048), of images uint8 (N, H, W) or (N, H, W, 3).

    Grey images are repeated into RGB. Progress is shown under `title`.
    """
    features = np.empty((len(images), FEATURES), np.float32)
    with Progress(title, len(images), "image") as progress:
        for start in range(0, len(images), BATCH):
            part = images[start : start + BATCH]
            planes = np.repeat(part[:, None], 3, axis=1) if part.ndim == 3 else part.transpose(0, 3, 1, 2)
            x = torch.from_numpy(np.ascontiguousarray(planes)).to(device)
            features[start : start + len(part)] = network(x).cpu().numpy()
            progress.advance(len(part))
    return features


@torch.no_grad()
def inception_score(network: Inception, features: NDArray[np.float32], device: torch.device) -> float:
    """Inception Score (Salimans et al. 2016) in one split, by the network's own last layer of 1,008 classes.

    It is exp(E_x KL(p(y|x) || p(y))) with p(y) the mean of p(y|x) over all images: 1 if all are alike, at most 1,008.

    Args:
        network: the network.
        features: float32 (N, 2048), N >= 1.
        device: where to compute.
    """
    logits = [
        network.fc(torch.from_numpy(features[n : n + 1000]).to(device)).double() for n in range(0, len(features), 1000)
    ]
    logs = torch.cat(logits).log_softmax(1)
    mean = logs.logsumexp(0) - np.log(len(logs))
    return float((logs.exp() * (logs - mean)).sum(1).mean().exp())
