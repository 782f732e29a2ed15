"""Train on synthetic images that are made meanwhile: there is no data set to store, and no real image.

The classifier learns the probabilities of the classes by the model's probe, softened by a temperature.

python examples/endless_dataset.py --model bundle-private --batches 10 --workers 2
"""

import argparse
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from rapid.interop.endless import EndlessImages

TEMPERATURE = 3.0


def main() -> None:
    """Train a linear classifier for some batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--batches", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()

    images = EndlessImages(options.model, seed=0, batch_size=options.batch_size, for_training=True)
    start = "spawn" if options.workers else None
    loader = DataLoader(images, options.batch_size, num_workers=options.workers, multiprocessing_context=start)
    inputs = int(torch.tensor(images.image_shape).prod())
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(inputs, len(images.classes)))
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for number, (x, chances) in zip(range(options.batches), loader, strict=False):
        loss = torch.nn.functional.cross_entropy(network(x), (chances.log() / TEMPERATURE).softmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"batch {number + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
