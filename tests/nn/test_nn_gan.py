"""The GAN's networks: sizes, the paper's numbers of parameters, and rows that do not mix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rapid.dp.gradients import ROUNDING_MARGIN, BookKeeper
from rapid.nn.gan import GanDiscriminator, GanGenerator

SHAPES = [(28, 1, 10), (32, 3, 2), (16, 1, 0), (49, 3, 3)]
"""Size, image channels, classes."""


def discriminator(
    size: int, image_channels: int, classes: int, channels: int = 8, labels: str = "planes"
) -> GanDiscriminator:
    torch.manual_seed(0)
    shape = {"size": size, "image_channels": image_channels, "classes": classes}
    return GanDiscriminator(shape | {"channels": channels, "labels": labels}).eval()


def generator(
    size: int, image_channels: int, classes: int, channels: int = 8, latent: int = 5, normalisation: str = "group"
) -> GanGenerator:
    torch.manual_seed(0)
    shape = {"size": size, "image_channels": image_channels, "classes": classes}
    return GanGenerator(shape | {"channels": channels, "latent": latent, "normalisation": normalisation}).eval()


def millions(network: nn.Module) -> float:
    return round(sum(p.numel() for p in network.parameters()) / 1e6, 2)


def test_the_numbers_of_parameters_are_those_of_the_paper() -> None:
    """MNIST and CelebA, and three other widths; the largest is 196 in the text, and 192 by its 3.86 M."""
    with torch.device("meta"):
        assert millions(discriminator(28, 1, 10, 128)) == 1.72
        assert millions(discriminator(32, 3, 2, 128)) == 2.64
        assert [millions(discriminator(28, 1, 10, width)) for width in (64, 96, 192)] == [0.44, 0.97, 3.86]
        assert millions(generator(28, 1, 10, 128, 128, "none")) == 2.27
        assert millions(generator(32, 3, 2, 128, 128, "none")) == 3.16


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("normalisation", ["group", "none"])
def test_images_have_the_size_and_do_not_depend_on_their_batch(
    shape: tuple[int, int, int], normalisation: str, tmp_path: Path
) -> None:
    size, colours, classes = shape
    network = generator(*shape, normalisation=normalisation)
    latents, labels = torch.randn(5, 5), torch.arange(5) % max(classes, 1)
    with torch.no_grad():
        images = network(latents, labels)
        assert images.shape == (5, colours, size, size)
        assert float(images.abs().max()) <= 1
        for row in range(5):
            torch.testing.assert_close(network(latents[row : row + 1], labels[row : row + 1])[0], images[row])
        network.save(tmp_path / "generator")
        assert torch.equal(GanGenerator.load(tmp_path / "generator")(latents, labels), images)
        if classes:
            # the label matters
            assert not torch.allclose(network(latents, (labels + 1) % classes), images, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("way", ["planes", "projection"])
def test_the_clipped_sum_of_the_discriminator_is_that_of_a_loop(shape: tuple[int, int, int], way: str) -> None:
    """Against one backward pass for each example alone, some of whose gradients are clipped and some are not."""
    size, colours, classes = shape
    network = discriminator(*shape, labels=way)
    images, labels = torch.rand(6, colours, size, size) * 2 - 1, torch.arange(6) % max(classes, 1)
    alone = []
    for row in range(6):
        loss = nn.functional.softplus(-network(images[row : row + 1], labels[row : row + 1])).sum()
        alone.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))]).double())
    norms = torch.stack([gradient.norm() for gradient in alone])
    clip_norm = float(norms.sort().values[2:4].mean())
    bound = clip_norm / (1 + ROUNDING_MARGIN)
    expected = sum(gradient * min(1.0, bound / float(norm)) for gradient, norm in zip(alone, norms, strict=True))
    keeper = BookKeeper(network)
    found, _ = keeper.clipped_sum(lambda: nn.functional.softplus(-network(images, labels)), 6, clip_norm)
    flat = torch.cat([part.flatten() for part in found])
    assert float((flat - expected).norm()) < 1e-4 * clip_norm


@pytest.mark.parametrize("size", [4, 5, 12, 20, 40])
def test_a_size_that_does_not_halve_to_four_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="does not lead to 4"):
        discriminator(size, 1, 10)
