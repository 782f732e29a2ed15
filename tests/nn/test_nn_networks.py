"""The three networks and the presets that build them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests_rights import as_anyone, locked
from torch import nn

from rapid.config.presets import DEFAULT_METHOD, preset_names, preset_tree
from rapid.diffusion import Schedule
from rapid.errors import InputError
from rapid.methods import apply_overrides, load_settings
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.nn.groups import group_count
from rapid.nn.storage import CONFIG, WEIGHTS

PAPER = {
    # latent shape, autoencoder multipliers, U-Net channels, multipliers, batch (Tables 6 and 7)
    "emnist-mnist": ((3, 4, 4), (1, 2, 3, 5), 64, (1, 2), 64),
    "imagenet32-cifar10": ((3, 16, 16), (1, 2), 128, (1, 2, 2, 4), 64),
    "ffhq32-celeba32": ((3, 16, 16), (1, 2), 192, (1, 2, 4), 64),
    "ffhq64-celeba64": ((3, 32, 32), (1, 2), 192, (1, 2, 4), 32),
}


PRESETS = [name for name in preset_names() if preset_tree(name).get("method", DEFAULT_METHOD) == "rapid"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds_its_networks_and_takes_a_step(name: str) -> None:
    chosen = load_settings(name)
    x = torch.rand(2, chosen.image.channels, chosen.image.size, chosen.image.size) * 2 - 1
    autoencoder = Autoencoder.build(chosen)
    mean, _ = autoencoder.posterior(x)
    assert mean.shape == (2, *chosen.latent_shape)
    decoded = autoencoder.decode_raw(mean)
    assert decoded.shape == x.shape
    denoiser, encoder = Denoiser.build(chosen, 3), TrajectoryEncoder.build(chosen)
    latents = torch.randn(2, *chosen.latent_shape)
    noise = denoiser(latents, torch.tensor([1, 1000]), torch.tensor([0, 3]))
    assert noise.shape == latents.shape
    features = encoder(latents)
    assert features.shape == (2, chosen.encoder.features)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(2))
    (decoded.square().mean() + noise.square().mean() + features[:, 0].mean()).backward()
    for network in (autoencoder, denoiser, encoder):
        optimizer = torch.optim.SGD(network.parameters(), 1e-3)
        optimizer.step()
        assert all(torch.isfinite(p).all() for p in network.parameters())


@pytest.mark.parametrize("name", PAPER)
def test_presets_of_the_paper(name: str) -> None:
    chosen = load_settings(name)
    shape, multipliers, channels, unet_multipliers, batch = PAPER[name]
    assert chosen.latent_shape == shape
    assert (chosen.autoencoder.channels, chosen.autoencoder.multipliers) == (128, multipliers)
    assert (chosen.denoiser.channels, chosen.denoiser.multipliers) == (channels, unet_multipliers)
    assert chosen.denoiser.training.batch_size == batch
    assert (chosen.retrieval.k, chosen.retrieval.v, chosen.generation.steps) == (800, 200, 100)
    assert chosen.private.expected_batch == 64


def build_all(chosen: RapidSettings) -> list[nn.Module]:
    return [Autoencoder.build(chosen), Denoiser.build(chosen, 3), TrajectoryEncoder.build(chosen)]


def test_saved_networks_load_as_they_were(tmp_path: Path, tiny_settings: RapidSettings) -> None:
    for network in build_all(tiny_settings):
        folder = tmp_path / type(network).__name__
        network.save(folder)
        again = type(network).load(folder)
        assert not again.training
        for (name, first), (other, second) in zip(
            network.state_dict().items(), again.state_dict().items(), strict=True
        ):
            assert name == other
            assert torch.equal(first, second)
        for file in (WEIGHTS, CONFIG):
            locked(folder / file)
            with as_anyone(), pytest.raises(InputError, match=f"{file}: cannot be read .permission denied.; give"):
                type(network).load(folder)
            (folder / file).chmod(0o600)
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-5])
        with pytest.raises(InputError, match="weights are missing, damaged"):
            type(network).load(folder)
        (folder / "config.json").write_text("{")
        with pytest.raises(InputError, match=r"config\.json"):
            type(network).load(folder)


def test_no_network_mixes_examples(tiny_settings: RapidSettings) -> None:
    autoencoder, denoiser, encoder = build_all(tiny_settings)
    x, latents = torch.randn(4, 1, 32, 32), torch.randn(4, *tiny_settings.latent_shape)
    t, y = torch.tensor([1, 10, 500, 1000]), torch.tensor([0, 1, 2, 3])
    for run in (
        lambda rows: autoencoder.decode(autoencoder.encode(x[rows])),
        lambda rows: denoiser(latents[rows], t[rows], y[rows]),
        lambda rows: encoder(latents[rows]),
    ):
        with torch.no_grad():
            together = run(slice(None))
            alone = torch.cat([run(slice(i, i + 1)) for i in range(4)])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("known", [0, 1, 3])
def test_new_classes_are_distinct_and_the_null_class_stays(tiny_settings: RapidSettings, known: int) -> None:
    public = Denoiser.build(tiny_settings, known)
    private = public.with_classes(5)
    x, t = torch.randn(1, *tiny_settings.latent_shape).repeat(6, 1, 1, 1), torch.full((6,), 100)
    with torch.no_grad():
        ours, theirs = private(x, t, torch.arange(6)), public(x, t, public.null_labels(6))
    torch.testing.assert_close(ours[5], theirs[5])
    assert torch.pdist(ours.flatten(1)).min() > 1e-4
    assert public.with_classes(0).num_classes == 0


@pytest.mark.parametrize("conditioning", ["embedding", "cross-attention"])
def test_timestep_and_class_reach_the_output(tiny_settings: RapidSettings, conditioning: str) -> None:
    chosen = apply_overrides(tiny_settings.model_dump(mode="json"), [f"denoiser.conditioning={conditioning}"])
    denoiser = Denoiser.build(chosen, 3)
    x = torch.randn(1, *chosen.latent_shape)

    def output(t: int, label: int) -> torch.Tensor:
        with torch.no_grad():
            return denoiser(x, torch.tensor([t]), torch.tensor([label]))

    assert (output(10, 0) - output(900, 0)).abs().max() > 1e-4
    assert (output(10, 0) - output(10, 1)).abs().max() > 1e-4


def test_errors_of_a_velocity_are_not_magnified(tmp_path: Path, tiny_settings: RapidSettings) -> None:
    schedule = Schedule.build(tiny_settings.schedule)
    torch.manual_seed(0)
    denoiser = Denoiser.build(tiny_settings, 3, tiny_settings.schedule)
    x0, eps = torch.randn(2, 4, *tiny_settings.latent_shape)
    t, y = torch.tensor([1, 200, 700, 1000]), torch.tensor([0, 1, 2, 3])
    x_t, a, b = schedule.diffuse(x0, eps, t), schedule.signal(t), schedule.noise(t)
    with torch.no_grad():
        predicted = denoiser.unet(x_t, t - 1, class_labels=denoiser.class_table(y)).sample
        denoised = schedule.denoise(x_t, denoiser(x_t, t, y), t)
        torch.testing.assert_close(denoised - x0, b * (a * eps - b * x0 - predicted), rtol=1e-3, atol=1e-3)
        denoiser.save(tmp_path)
        torch.testing.assert_close(Denoiser.load(tmp_path)(x_t, t, y), denoiser(x_t, t, y))
        private = denoiser.with_classes(2)
        null = (net(x_t, t, net.null_labels(4)) for net in (private, denoiser))
        torch.testing.assert_close(*null)


def test_pixel_space(tiny_settings: RapidSettings) -> None:
    chosen = apply_overrides(tiny_settings.model_dump(mode="json"), ["autoencoder.kind=none"])
    assert chosen.latent_shape == (1, 32, 32)
    autoencoder = Autoencoder.build(chosen)
    autoencoder.set_statistics(torch.tensor([-0.7]), torch.tensor([0.4]))
    x = torch.rand(2, 1, 32, 32)
    torch.testing.assert_close(autoencoder.decode(autoencoder.encode(x)), x)
    torch.testing.assert_close(autoencoder.encode(x), (x + 0.7) / 0.4)
    with pytest.raises(TypeError, match="kind 'kl'"):
        autoencoder.posterior(x)


def test_groups_divide_and_hold_several_channels() -> None:
    for channels in range(1, 300):
        count = group_count(channels)
        assert channels % count == 0
        assert count <= 32
        assert channels < 8 or count < channels
