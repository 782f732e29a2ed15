"""The public stage: training that resumes, augmentation, the knowledge base, the finished bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rapid.bundle.format import Bundle
from rapid.config.presets import apply_overrides
from rapid.config.sections import AugmentSettings, Settings, Training
from rapid.data import fit_images, load_images, to_unit_range
from rapid.data.augment import augment
from rapid.diffusion import Schedule
from rapid.errors import InputError
from rapid.nn import Denoiser
from rapid.stages import build_public_bundle
from rapid.training.loop import learning_rate, train
from rapid.training.reuse import DEPENDS

CPU = torch.device("cpu")


def trained(path: Path, stop_at: int | None, *, again: bool) -> dict[str, Tensor]:
    """Weights after 12 steps, interrupted at a step if asked, and then gone on with."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    calls = 0

    def loss(generator: torch.Generator) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        return network(torch.randn(8, 3, generator=generator)).square().mean()

    chosen = Training(steps=12, batch_size=8, warmup_steps=3)
    if stop_at is not None:
        with pytest.raises(KeyboardInterrupt):
            train("test", network, loss, chosen, path)
    if again:
        torch.manual_seed(99)
        network.reset_parameters()
    train("test", network, loss, chosen, path)
    return network.state_dict()


def test_a_resumed_training_is_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = trained(tmp_path / "a.pt", None, again=False)
    for stop in (1, 5, 12):
        parts = trained(tmp_path / f"b{stop}.pt", stop, again=True)
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_learning_rate_rises_and_falls() -> None:
    chosen = Training(steps=100, warmup_steps=10, learning_rate=1.0)
    rates = [learning_rate(chosen, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.01
    assert learning_rate(Training(steps=1), 0) > 0


NOTHING = AugmentSettings(rotate=0, scale=0, shift=0)


def test_augmentation() -> None:
    images = torch.rand(6, 1, 16, 16) * 2 - 1
    torch.testing.assert_close(augment(images, NOTHING, torch.Generator()), images, rtol=1e-4, atol=1e-4)
    views = augment(images, AugmentSettings(brightness=0.5), torch.Generator().manual_seed(1))
    assert views.min() >= -1
    assert views.max() <= 1
    assert not torch.allclose(views, images, atol=0.1)
    # every image has its own transformation
    same = augment(images[:1].repeat(6, 1, 1, 1), AugmentSettings(), torch.Generator().manual_seed(1))
    assert len({view.numpy().tobytes() for view in same}) == 6
    flipped = augment(images.repeat(10, 1, 1, 1), NOTHING.model_copy(update={"flip": True}), torch.Generator())
    kinds = [
        (torch.allclose(view, image, atol=1e-3), torch.allclose(view, image.flip(-1), atol=1e-3))
        for view, image in zip(flipped, images.repeat(10, 1, 1, 1), strict=True)
    ]
    assert {(True, False), (False, True)} == set(kinds)


def test_keys_and_values_are_of_one_noise_draw(public_bundle: Path, letters: Path, tiny_settings: Settings) -> None:
    """eps is recovered from each stored value; its key must follow from it."""
    bundle = Bundle.open(public_bundle, "base")
    split = np.load(public_bundle / "split.npz")
    images = fit_images(load_images(letters, "-"), tiny_settings.image, "-")
    assert images.labels is not None
    reference = split["reference"]
    assert sorted([*split["pre_training"], *reference]) == list(range(60))
    latents = bundle.autoencoder().encode(to_unit_range(images.images[reference]))
    schedule = Schedule.build(tiny_settings.schedule)
    count, k = len(reference), tiny_settings.retrieval.k
    base = bundle.knowledge_base()
    values = torch.from_numpy(base.values(np.arange(count)))
    eps = schedule.implied_noise(latents, values, torch.full((count,), tiny_settings.retrieval.v))
    x_k = schedule.diffuse(latents, eps, torch.full((count,), k))
    denoiser = bundle.denoiser()
    with torch.no_grad():
        t = torch.full((count,), k)
        keys = bundle.encoder()(schedule.denoise(x_k, denoiser(x_k, t, denoiser.null_labels(count)), t))
    stored = faiss.read_index(str(public_bundle / "knowledge_base" / "keys.faiss")).reconstruct_n(0, count)
    np.testing.assert_allclose(keys.numpy(), stored, rtol=1e-2, atol=1e-3)
    assert (base.labels == images.labels[reference]).all()
    assert (base.manifest.k, base.manifest.v, base.manifest.timesteps) == (800, 200, 1000)
    # latents are normalised with the statistics of the other part
    everything = bundle.autoencoder().encode(to_unit_range(images.images[split["pre_training"]]))
    torch.testing.assert_close(everything.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-3)
    torch.testing.assert_close(everything.std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-3)


def test_what_is_done_is_not_done_again(tmp_path: Path, letters: Path, tiny_settings: Settings) -> None:
    out = tmp_path / "out"
    build_public_bundle([letters], out, tiny_settings, CPU, resume=False)
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    assert not list((out / "checkpoints").glob("*.pt"))
    with pytest.raises(InputError, match="--resume"):
        build_public_bundle([letters], out, tiny_settings, CPU, resume=False)
    build_public_bundle([letters], out, tiny_settings, CPU, resume=True)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()} == before
    # as if it had been stopped after the autoencoder
    for name in ("denoiser", "encoder", "knowledge_base"):
        shutil.rmtree(out / name)
    (out / "config.json").unlink()
    with pytest.raises(InputError, match="not finished"):
        Bundle.open(out, "model")
    build_public_bundle([letters], out, tiny_settings, CPU, resume=True)
    weights = out / "autoencoder" / "diffusion_pytorch_model.safetensors"
    assert weights.stat().st_mtime_ns == before[weights]
    assert len(Bundle.open(out, "model").knowledge_base()) == 18


def test_other_settings_images_or_contents_are_refused(
    tmp_path: Path, public_bundle: Path, letters: Path, digits: Path, tiny_settings: Settings
) -> None:
    other = apply_overrides(tiny_settings.model_dump(mode="json"), ["retrieval.k=700"])
    with pytest.raises(InputError, match=r"settings\.retrieval\.k"):
        build_public_bundle([letters], public_bundle, other, CPU, resume=True)
    with pytest.raises(InputError, match="public"):
        build_public_bundle([digits], public_bundle, tiny_settings, CPU, resume=True)
    # private training and sampling are not decided by the public stage
    other = apply_overrides(tiny_settings.model_dump(mode="json"), ["private.steps=7", "generation.steps=7"])
    assert build_public_bundle([letters], public_bundle, other, CPU, resume=True).settings == tiny_settings
    (tmp_path / "thing.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match="holds something else"):
            build_public_bundle([letters], tmp_path, tiny_settings, CPU, resume=resume)
    assert [p.name for p in tmp_path.iterdir()] == ["thing.txt"]


def test_foreign_and_damaged_parts_are_refused(tmp_path: Path, public_bundle: Path, tiny_settings: Settings) -> None:
    swapped = tmp_path / "swapped"
    shutil.copytree(public_bundle, swapped)
    shutil.rmtree(swapped / "denoiser")
    Denoiser.build(tiny_settings, 13).save(swapped / "denoiser")
    with pytest.raises(InputError, match="denoiser/ is missing or not the one"):
        Bundle.open(swapped, "model")
    # even if the configuration is made to fit, the knowledge base knows its networks
    from rapid.files import content_hash

    config = json.loads((swapped / "config.json").read_text())
    config["networks"]["denoiser"] = content_hash(swapped / "denoiser")
    (swapped / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="denoiser"):
        Bundle.open(swapped, "model").knowledge_base()
    damaged = tmp_path / "damaged"
    shutil.copytree(public_bundle, damaged)
    values = damaged / "knowledge_base" / "values.npy"
    values.write_bytes(values.read_bytes()[:-7])
    with pytest.raises(InputError, match="knowledge_base"):
        Bundle.open(damaged, "model").knowledge_base()
    (damaged / "config.json").write_text("{}")
    with pytest.raises(InputError, match="damaged or of another version"):
        Bundle.open(damaged, "model")


def test_two_sets_of_other_size_are_joined_with_classes_apart(
    tmp_path: Path, letters: Path, tiny_settings: Settings
) -> None:
    other = tmp_path / "devanagari.npz"
    rng = np.random.default_rng(0)
    np.savez(other, images=rng.integers(0, 256, (40, 32, 32), np.uint8), labels=np.arange(40) % 2, classes=["A", "ka"])
    bundle = build_public_bundle([letters, other], tmp_path / "out", tiny_settings, CPU, resume=False)
    assert bundle.config.classes[:2] == ("letters/A", "letters/B")
    assert bundle.config.classes[-2:] == ("devanagari/A", "devanagari/ka")
    assert bundle.config.public.pre_training + bundle.config.public.reference == 100
    assert bundle.denoiser().num_classes == 15


def test_retrieval_accuracy(public_bundle: Path, letters: Path, tiny_settings: Settings) -> None:
    """Of D_pre against D_ref, with a search by hand over keys from the faiss file."""
    bundle = Bundle.open(public_bundle, "base")
    found = bundle.config.retrieval
    assert found is not None
    pre = np.load(public_bundle / "split.npz")["pre_training"]
    images = fit_images(load_images(letters, "-"), tiny_settings.image, "-")
    assert images.labels is not None
    assert found.queries == len(pre) == 42
    generator = torch.Generator().manual_seed(6)
    order = torch.randperm(42, generator=generator).numpy()
    latents = bundle.autoencoder().encode(to_unit_range(images.images[pre[order]]))
    k, denoiser = torch.full((42,), tiny_settings.retrieval.k), bundle.denoiser()
    schedule = Schedule.build(tiny_settings.schedule)
    x_k = schedule.diffuse(latents, torch.randn(latents.shape, generator=generator), k)
    with torch.no_grad():
        queries = bundle.encoder()(schedule.denoise(x_k, denoiser(x_k, k, denoiser.null_labels(42)), k))
    stored = faiss.read_index(str(public_bundle / "knowledge_base" / "keys.faiss"))
    nearest = torch.cdist(queries, torch.from_numpy(stored.reconstruct_n(0, stored.ntotal))).argsort(1).numpy()
    labels, wanted = bundle.knowledge_base().labels, images.labels[pre[order]]
    hits = labels[nearest] == wanted[:, None]
    assert found.top1 == pytest.approx(hits[:, 0].mean(), abs=0.03)
    assert found.top5 == pytest.approx(hits[:, :5].any(1).mean(), abs=0.03)
    assert found.chance == pytest.approx(hits.mean())
    assert f"{found.top1:.1%}" in (public_bundle / "README.md").read_text()


@pytest.mark.parametrize(
    ("changed", "taken"),
    [
        ("retrieval.v=100", {"autoencoder", "denoiser", "encoder", "probe"}),
        ("augmentations.reference=50", {"autoencoder", "denoiser", "encoder", "probe"}),
        ("retrieval.k=700", {"autoencoder", "denoiser", "probe"}),
        ("encoder.temperature=0.2", {"autoencoder", "denoiser", "probe"}),
        ("denoiser.training.learning_rate=1e-4", {"autoencoder", "probe"}),
        ("probe.training.learning_rate=1e-4", {"autoencoder", "denoiser", "encoder"}),
        ("augmentations.augment.rotate=1", {"probe"}),
        ("split.seed=1", set()),
    ],
)
def test_networks_of_another_bundle(
    tmp_path: Path,
    public_bundle: Path,
    letters: Path,
    tiny_settings: Settings,
    changed: str,
    taken: set[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What depends on a changed setting is trained; the bundle is the one that is made without the other."""
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), [changed])
    capfd.readouterr()
    bundle = build_public_bundle([letters], tmp_path / "with", settings, CPU, resume=False, networks=public_bundle)
    bars = {line.split(":")[0].strip() for line in capfd.readouterr().err.replace("\r", "\n").split("\n")}
    assert bars & set(DEPENDS) == set(DEPENDS) - taken
    alone = build_public_bundle([letters], tmp_path / "alone", settings, CPU, resume=False)
    for name in bundle.config.networks:
        own, other = (list(getattr(one, name)().state_dict().values()) for one in (bundle, alone))
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))
    entries = np.arange(len(bundle.knowledge_base()))
    values = [one.knowledge_base().values(entries) for one in (bundle, alone)]
    np.testing.assert_array_equal(*values)


def test_networks_of_other_images(tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: Settings) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"--networks .*other images"):
        build_public_bundle([digits], out, tiny_settings, CPU, resume=False, networks=public_bundle)
    assert not out.exists()
