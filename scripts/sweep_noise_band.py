"""What correlated noise is worth: a small classifier, fine-tuned privately with each noise band at the same epsilon.

`scripts/sweep-noise-band --public FILE.npz --private FILE.npz --out FILE.json` pre-trains a small network on
the public classes once. Then it fine-tunes it on the private ones, for each epsilon, band and learning rate, and prints
the test accuracy. Everything but the noise and who has a turn is the same.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from commands import at_least, check_file, told
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.dp import DpSgdSpec, PrivateMechanism, Release, calibrate
from rapid.dp.correlation import noise_factor
from rapid.errors import InputError
from rapid.files import content_hash, write_json
from rapid.training import Trainer
from rapid.training.optimizers import noisy_schedule

SIDE, HELD_OUT, PUBLIC_IMAGES, PUBLIC_STEPS = 28, 2000, 6000, 400
CLIP_NORM, EMA_DECAY, MOMENTUM, DELTA = 1.0, 0.98, 0.9, 1e-5


def load(path: Path) -> tuple[Tensor, Tensor]:
    """Images float (N, 1, 28, 28) in [-1, 1], and labels int64 (N,)."""
    found = np.load(path)
    images = torch.from_numpy(found["images"]).float()[:, None] / 127.5 - 1
    return F.interpolate(images, SIDE, mode="area"), torch.from_numpy(found["labels"]).long()


def trunk() -> nn.Sequential:
    """Two convolutions, which stay as the public images made them: images -> float (N, 1568)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, 2), nn.GroupNorm(4, 16), nn.SiLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.SiLU(), nn.Flatten(),
    )  # fmt: skip


def head(classes: int) -> nn.Sequential:
    """Two linear layers, which are trained privately."""
    return nn.Sequential(nn.Linear(32 * 49, 64), nn.SiLU(), nn.Linear(64, classes))


def pretrain(images: Tensor, labels: Tensor) -> tuple[nn.Sequential, nn.Sequential]:
    """Trunk and head of a network that knows the public classes."""
    torch.manual_seed(0)
    below, above = trunk(), head(int(labels.max()) + 1)
    optimizer = torch.optim.Adam([*below.parameters(), *above.parameters()], lr=2e-3)
    for _ in range(PUBLIC_STEPS):
        batch = torch.randint(len(images), (128,))
        optimizer.zero_grad()
        F.cross_entropy(above(below(images[batch])), labels[batch]).backward()
        optimizer.step()
    return below, above


def fine_tune(public: nn.Sequential, x: Tensor, y: Tensor, release: Release, rate: float) -> nn.Module:
    """The head with a new last layer, trained privately on features x."""
    model, steps = copy.deepcopy(public), release.spec.steps
    model[-1] = nn.Linear(64, int(y.max()) + 1)
    for parameter in model[-1].parameters():
        nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=MOMENTUM)
    trainer = Trainer(model, optimizer, noisy_schedule(optimizer, steps), ema_decay=EMA_DECAY)
    mechanism = PrivateMechanism(
        release,
        model,
        lambda indices: F.cross_entropy(model(x[indices]), y[indices], reduction="none"),
        physical_batch=256,
    )

    def backward(_: int) -> None:
        for parameter, gradient in zip(mechanism.parameters, mechanism.gradient(), strict=True):
            parameter.grad = gradient

    trainer.run(steps, backward, title="", shown=False)
    return model


def features(below: nn.Module, images: Tensor) -> Tensor:
    """The trunk's outputs, float (N, 1568)."""
    with torch.no_grad():
        return torch.cat([below(part) for part in images.split(500)])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--public", type=Path, required=True)
    parser.add_argument("--private", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epsilon", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--band", type=at_least(1), nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rate", type=float, nargs="+", default=[0.5])
    parser.add_argument("--batch", type=at_least(1), default=128)
    parser.add_argument("--steps", type=at_least(1), default=400)
    parser.add_argument("--repeats", type=at_least(1), default=3)
    return parser.parse_args()


def earlier_points(out: Path, sets: Mapping[str, str]) -> list[dict[str, Any]]:
    """The points that a file has already.

    Args:
        out: the file; it need not exist.
        sets: hashes of the image sets, which each point has.

    Raises:
        InputError: it has points of other sets.
    """
    points: list[dict[str, Any]] = json.loads(out.read_text()) if out.exists() else []
    if any({name: point.get(name) for name in sets} != sets for point in points):
        raise InputError("out", "has points of other image sets; choose another name", out)
    return points


def main() -> None:
    """Run the sweep; points that `--out` has already are not repeated."""
    options = _options()
    torch.set_num_threads(1)
    with told("sweep-noise-band"):
        check_file(options.out)
        sets = {name: content_hash(getattr(options, name)) for name in ("public", "private")}
        points = earlier_points(options.out, sets)
        (images, labels), public_set = load(options.private), load(options.public)
    x, y, test_x, test_y = images[HELD_OUT:], labels[HELD_OUT:], images[:HELD_OUT], labels[:HELD_OUT]
    public_x, public_y = (part[:PUBLIC_IMAGES] for part in public_set)
    below, public = pretrain(public_x, public_y)
    x, test_x = features(below, x), features(below, test_x)
    keys = ("epsilon", "band", "rate", "batch", "steps", "repeat")
    done = {tuple(point[key] for key in keys) for point in points}
    for repeat, epsilon, rate, band in itertools.product(
        range(options.repeats), options.epsilon, options.rate, options.band
    ):
        if (epsilon, band, rate, options.batch, options.steps, repeat) in done:
            continue
        spec = DpSgdSpec(
            name="classifier", dataset_size=len(x), expected_batch=options.batch, steps=options.steps,
            clip_norm=CLIP_NORM, band=band,
        )  # fmt: skip
        known = [p for p in points if all(p[k] == v for k, v in zip(keys[:2], (epsilon, band), strict=True))]
        known = [p for p in known if (p["batch"], p["steps"]) == (options.batch, options.steps)]
        sigma = (
            known[0]["noise_multiplier"]
            if known
            else calibrate([spec], epsilon=epsilon, delta=DELTA).main.noise_multiplier
        )
        begin = time.monotonic()
        model = fine_tune(public, x, y, Release(spec=spec, noise_multiplier=sigma), rate)
        with torch.no_grad():
            right = (model(test_x).argmax(1) == test_y).double().mean().item()
        points.append(
            {
                "epsilon": epsilon,
                "band": band,
                "rate": rate,
                **sets,
                "batch": options.batch,
                "steps": options.steps,
                "repeat": repeat,
                "noise_multiplier": sigma,
                "noise_of_sum": sigma * noise_factor(band, options.steps),
                "accuracy": right,
                "seconds": round(time.monotonic() - begin, 1),
            }
        )
        write_json(options.out, points)
        print(points[-1], flush=True)


if __name__ == "__main__":
    main()
