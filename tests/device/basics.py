"""What the tests of the pretend device itself do with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from device.pretend import counting
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from rapid.data.augmented import AugmentedImages
from rapid.diffusion import Schedule
from rapid.diffusion.losses import denoising_loss, guided_loss, info_nce
from rapid.methods.rapid.networks import AutoencoderRecipe, train_autoencoder
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.training import Checkpoint

Mix = Callable[[Tensor, Tensor], object]
REFUSED: dict[str, Mix] = {
    "a sum": lambda here, there: here + there,
    "a matrix product": lambda here, there: here @ there,
    "a layer": lambda here, there: F.conv2d(here[None, None], there[None, None]),
    "a join": lambda here, there: torch.cat([here, there]),
    "an index of the device into the CPU": lambda here, there: there[here.argmax(0)],
    "values of the CPU at an index": lambda here, there: here.index_put_((here.argmax(0),), there),
    "a number of the device into the CPU": lambda here, there: there.add_(here.sum()),
    "NumPy": lambda here, there: np.asarray(here),
    "a generator of the CPU": lambda here, there: here.normal_(generator=torch.Generator()),
}
ALLOWED: dict[str, Mix] = {
    "a number of the CPU": lambda here, there: here * there.sum(),
    "a choice between numbers": lambda here, there: torch.where(here > 0, torch.tensor(1.0), here),
    "an index of the CPU": lambda here, there: here[there.argmax(0)],
    "a copy": lambda here, there: here.copy_(there),
    "a cast of all": lambda here, there: there.to(here),
}


def mixed(device: torch.device) -> tuple[list[str], list[str]]:
    """The names in REFUSED that pass, and those in ALLOWED that do not."""
    here, there = torch.eye(3, device=device), torch.eye(3)
    passed, failed = [], []
    for name, function in REFUSED.items():
        try:
            function(here, there)
            passed.append(name)
        except (RuntimeError, TypeError):
            pass
    for name, function in ALLOWED.items():
        try:
            function(here, there)
        except RuntimeError as error:
            failed.append(f"{name}: {error}")
    return passed, failed


def counts(device: torch.device) -> list[tuple[int, int]]:
    """(kernels, waits) of some operations."""
    x, mask = torch.ones(4, 4, device=device), torch.ones(4, dtype=torch.bool, device=device)
    operations: list[Callable[[], object]] = [
        lambda: x.view(2, 8).T,
        lambda: x + 1,
        lambda: x.sum().item(),
        x.cpu,
        lambda: torch.zeros(3).to(device),
        lambda: x[mask],
        lambda: torch.arange(3, device=device),
    ]
    found = []
    for operation in operations:
        with counting() as counted:
            operation()
        found.append((counted.kernels.total(), counted.waits.total()))
    return found


def computed(device: torch.device) -> list[NDArray[np.float32]]:
    """Gradients and weights of two steps of Adam."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.Flatten(), nn.Linear(16, 3)).to(
        device
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    x = torch.arange(64.0).view(2, 2, 4, 4).to(device) / 64
    for _ in range(2):
        optimizer.zero_grad()
        network(x).square().sum().backward()
        optimizer.step()
    return [part.detach().cpu().numpy() for p in network.parameters() for part in (p, p.grad) if part is not None]


def linear_autoencoder(device: torch.device, settings: RapidSettings, folder: Path) -> list[NDArray[np.float32]]:
    """Images of latents by principal components and their decoder, fitted there, and the gradient of their squares."""
    images = np.random.default_rng(0).integers(0, 256, (60, settings.image.size, settings.image.size), np.uint8)
    augment = settings.augmentations.augment
    recipe = AutoencoderRecipe(
        images="", image=settings.image, views=0, augment=augment, autoencoder=settings.autoencoder
    )
    views = AugmentedImages(images, np.zeros(60, np.int64), 0, augment, device)
    model = train_autoencoder(recipe, views, device, Checkpoint(folder / device.type))
    latents = model.encode(views.batch(0, 4)).requires_grad_()
    decoded = model.decode_raw(model.unnormalised(latents))
    decoded.square().sum().backward()
    assert latents.grad is not None
    return [part.detach().cpu().numpy() for part in (decoded, latents.grad)]


def public_steps(device: torch.device, settings: RapidSettings, autocast: bool) -> dict[str, tuple[float, float]]:
    """Loss and norm of the gradient of one step of each public network, with the same weights and draws."""
    torch.manual_seed(0)
    networks = [kind.build(settings).to(device) for kind in (Autoencoder, TrajectoryEncoder)]
    autoencoder, encoder = networks
    denoiser = Denoiser.build(settings, 3).to(device)
    guided = Denoiser.build(settings, 3).to(device)
    velocities = Denoiser.build(settings, 3, settings.schedule).to(device)
    schedule = Schedule.build(settings.schedule).to(device)
    images = torch.rand(4, settings.image.channels, settings.image.size, settings.image.size).to(device)
    latents, eps = torch.randn(2, 4, *settings.latent_shape).to(device)
    t, y = torch.tensor([1, 100, 500, 1000], device=device), torch.tensor([0, 1, 2, 3], device=device)
    losses: dict[str, tuple[nn.Module, Callable[[], Tensor]]] = {
        "autoencoder": (
            autoencoder,
            lambda: autoencoder.decode_raw(autoencoder.posterior(images)[0]) - images,
        ),
        "denoiser": (denoiser, lambda: denoising_loss(denoiser, schedule, latents, y, t, eps)),
        "guided": (guided, lambda: guided_loss(guided, schedule, latents, y, guided.null_labels(4), t, eps, 1.5)),
        "velocities": (velocities, lambda: denoising_loss(velocities, schedule, latents, y, t, eps)),
        "encoder": (encoder, lambda: info_nce(encoder(latents), encoder(latents + 0.1 * eps), 0.1)),
    }
    found = {}
    for name, (network, loss) in losses.items():
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            value = loss().float().abs().mean()
        value.backward()
        gradients = [p.grad for p in network.parameters() if p.grad is not None]
        assert {gradient.dtype for gradient in gradients} == {torch.float32}
        norm = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).norm()
        found[name] = value.item(), norm.item()
    return found


def fails(device: torch.device) -> float:
    return 1 / 0
