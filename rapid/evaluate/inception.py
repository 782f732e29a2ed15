"""The features of the standard FID: torch-fidelity's Inception network, which reproduces the original TensorFlow one.

Its weights (`weights-inception-2015-12-05-6726825d.pth`) are published with torch-fidelity and are not part of rapid;
the user gives their path.
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
from torch import nn

from rapid.errors import InputError
from rapid.progress import Progress

BATCH = 50
FEATURES = "2048"


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


def load_inception(path: Path, device: torch.device) -> nn.Module:
    """Load the Inception network with weights from `path`, in evaluation mode.

    Raises:
        InputError: torch-fidelity is not installed, or the file does not contain its weights.
    """
    extractor = inception_class()
    if not path.is_file():
        raise InputError("inception", "is not a file; give the weights published by torch-fidelity", path)
    try:
        # the extractor unpickles the file without restrictions, so check first that it contains only tensors
        torch.load(path, map_location="cpu", weights_only=True)
        network: nn.Module = extractor("inception-v3-compat", [FEATURES], str(path))
    except (RuntimeError, ValueError, EOFError, TypeError, AttributeError, pickle.UnpicklingError):
        problem = "does not contain the weights of torch-fidelity's Inception network; download them again"
        raise InputError("inception", problem, path) from None
    return network.to(device).eval()


@torch.no_grad()
def inception_features(
    network: nn.Module, images: NDArray[np.uint8], device: torch.device, title: str
) -> NDArray[np.float64]:
    """Features of the last pooling layer, float64 (N, 2048), of images uint8 (N, H, W) or (N, H, W, 3).

    Grey images are repeated into RGB. The network scales all images to 299x299, as it does for published FID values.
    Progress is shown under `title`.
    """
    features = np.empty((len(images), int(FEATURES)), np.float64)
    with Progress(title, len(images), "image") as progress:
        for start in range(0, len(images), BATCH):
            part = images[start : start + BATCH]
            planes = np.repeat(part[:, None], 3, axis=1) if part.ndim == 3 else part.transpose(0, 3, 1, 2)
            x = torch.from_numpy(np.ascontiguousarray(planes)).to(device)
            features[start : start + len(part)] = network(x)[0].double().cpu().numpy()
            progress.advance(len(part))
    return features
