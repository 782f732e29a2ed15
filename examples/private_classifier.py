"""The mechanism by itself: DP-SGD of a small classifier, on the digits that ship with rapid.

python examples/private_classifier.py --epsilon 2
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.data import load_images, sample_path, to_unit_range
from rapid.dp import DpSgdSpec, PrivateMechanism, calibrate
from rapid.rounding import rounded_up


def main() -> None:
    """Train on nine tenths of the digits, and test on the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilon", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()

    digits = load_images(sample_path("digits"), "digits")
    assert digits.labels is not None
    x, y = to_unit_range(digits.images), torch.from_numpy(digits.labels)
    train = len(x) * 9 // 10

    # the public numbers first, then the least noise with which they spend at most epsilon
    spec = DpSgdSpec(name="classifier", dataset_size=train, expected_batch=512, steps=options.steps, clip_norm=1.0)
    budget = calibrate([spec], epsilon=options.epsilon, delta=1e-5)

    network = nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, 2), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(784, 10)
    )

    def losses(indices: Tensor) -> Tensor:
        return F.cross_entropy(network(x[indices]), y[indices], reduction="none")

    mechanism = PrivateMechanism(budget.main, network, losses, physical_batch=256)
    optimizer = torch.optim.Adam(mechanism.parameters, lr=5e-3)
    for _ in range(spec.steps):
        for parameter, gradient in zip(mechanism.parameters, mechanism.gradient(), strict=True):
            parameter.grad = gradient
        optimizer.step()

    # these test digits are open data; with private ones this number would need a release of its own
    accuracy = (network(x[train:]).argmax(1) == y[train:]).float().mean()
    print(f"epsilon {rounded_up(budget.spent, 4)} at delta {rounded_up(budget.delta)}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
