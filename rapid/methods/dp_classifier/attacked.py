"""Scores for membership inference: how sure the classifier is of the right class of an image.

A classifier is surer of images that it was trained on (Yeom, Giacomelli, Fredrikson, Jha 2018). The scores are log-odds
rather than losses, which are close to 0 for most images (Carlini et al. 2022, section IV-C). Training saw random views,
so one score is the mean over views (Choquette-Choo, Tramer, Carlini, Papernot 2021).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rapid.bundle import Bundle
from rapid.data import ImageSet, to_unit_range
from rapid.data.views import DRAWS, random_views
from rapid.methods.dp_classifier.public_stage import CLASSIFIER
from rapid.methods.dp_classifier.settings import DpClassifierSettings
from rapid.nn.wide_resnet import WideResNet
from rapid.progress import Progress
from rapid.stopping import check_stop

VIEWS = 16
"""Of each image; the same draws for all images, which takes their randomness out of the comparison."""
AT_ONCE = 250


@torch.no_grad()
def membership_scores(bundle: Bundle, images: ImageSet, device: torch.device) -> Mapping[str, NDArray[np.float64]]:
    """Log-odds of the label, of the image as it is and as a mean over views; see `rapid.methods.base.Inspectable`.

    Of unlabelled images, those of the most likely class.
    """
    settings = bundle.settings_as(DpClassifierSettings)
    network = bundle.component(CLASSIFIER, WideResNet).to(device).eval()
    draws = torch.rand(VIEWS, DRAWS, generator=torch.Generator().manual_seed(0)).to(device)
    plain, mean = np.zeros(len(images)), np.zeros(len(images))
    with Progress("attack", (1 + VIEWS) * len(images), "view") as progress:
        for start in range(0, len(images), AT_ONCE):
            part = slice(start, min(start + AT_ONCE, len(images)))
            x = to_unit_range(images.images[part], device)
            logits = network(x)
            labels = logits.argmax(1) if images.labels is None else torch.from_numpy(images.labels[part]).to(device)
            plain[part] = log_odds(logits, labels).cpu().numpy()
            for draw in draws:
                check_stop()
                views = random_views(x, draw.expand(len(x), DRAWS), settings.private.views)
                mean[part] += log_odds(network(views), labels).cpu().numpy() / VIEWS
            progress.advance((1 + VIEWS) * len(x))
    return {"confidence of the classifier": plain, "confidence over views": mean}


def log_odds(logits: Tensor, labels: Tensor) -> Tensor:
    """log(p / (1 - p)) of the label's probability, float64 (n,); finite also where p rounds to 1.

    Args:
        logits: float (n, classes), at least two classes.
        labels: int64 (n,).
    """
    values = logits.double()
    own = values.gather(1, labels[:, None])
    others = values.scatter(1, labels[:, None], -torch.inf)
    return own.squeeze(1) - others.logsumexp(1)
