"""A PyTorch dataset of endless synthetic images: a training loop never sees an image twice, and no real one at all.

python examples/endless_dataset.py --model bundle-private --batches 10
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from rapid.data import to_unit_range
from rapid.methods import open_generator
from rapid.sampling.generate import generate


class SyntheticImages(IterableDataset[tuple[Tensor, Tensor]]):
    """Batches of images, float (n, C, H, W) in [-1, 1], and their classes, int64 (n,).

    Args:
        model: a bundle with classes.
        batch_size: n.
        seed: of the first batch; the next one has the next seed.
    """

    def __init__(self, model: Path, batch_size: int, seed: int = 0) -> None:
        self.generator = open_generator(model)
        self.batch_size = batch_size
        self.seed = seed

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        seed = self.seed
        while True:
            samples = generate(self.generator, self.batch_size, seed=seed)
            assert samples.labels is not None
            yield to_unit_range(samples.images), torch.from_numpy(samples.labels)
            seed += 1


def main() -> None:
    """Train a linear classifier for some batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()

    images = SyntheticImages(options.model, options.batch_size)
    inputs = int(torch.tensor(images.generator.image_shape).prod())
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(inputs, len(images.generator.classes)))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for number, (x, y) in zip(range(options.batches), DataLoader(images, batch_size=None), strict=False):
        loss = torch.nn.functional.cross_entropy(network(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"batch {number + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
