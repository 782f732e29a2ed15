"""The public stage: the knowledge base, the finished bundle, what is made again and what is taken over."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from rapid.bundle import Bundle
from rapid.bundle.networks import open_networks
from rapid.data import fit_images, load_images, to_unit_range
from rapid.diffusion import Schedule
from rapid.errors import InputError
from rapid.files import content_hash
from rapid.methods import apply_overrides
from rapid.methods.rapid.knowledge_base import open_knowledge_base
from rapid.methods.rapid.retrieval import RetrievalAccuracy
from rapid.methods.rapid.settings import RapidSettings
from rapid.methods.rapid.subspace import Subspace
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.probe.network import Probe
from rapid.stages.public import build_public_bundle

CPU = torch.device("cpu")
NETWORKS = {"autoencoder": Autoencoder, "denoiser": Denoiser, "encoder": TrajectoryEncoder, "probe": Probe}


def test_keys_and_values_are_of_one_noise_draw(
    public_bundle: Path, letters: Path, tiny_settings: RapidSettings
) -> None:
    """eps is recovered from each stored value; its key must follow from it."""
    bundle = Bundle.open(public_bundle, "base")
    split = np.load(public_bundle / "split.npz")
    images = fit_images(load_images(letters, "-"), tiny_settings.image, "-")
    assert images.labels is not None
    reference = split["reference"]
    assert sorted([*split["pre_training"], *reference]) == list(range(60))
    latents = bundle.component("autoencoder", Autoencoder).encode(to_unit_range(images.images[reference]))
    schedule = Schedule.build(tiny_settings.schedule)
    count, k = len(reference), tiny_settings.retrieval.k
    base = open_knowledge_base(bundle)
    values = torch.from_numpy(base.values(np.arange(count)))
    eps = schedule.implied_noise(latents, values, torch.full((count,), tiny_settings.retrieval.v))
    x_k = schedule.diffuse(latents, eps, torch.full((count,), k))
    denoiser = bundle.component("denoiser", Denoiser)
    with torch.no_grad():
        t = torch.full((count,), k)
        keys = bundle.component("encoder", TrajectoryEncoder)(
            schedule.denoise(x_k, denoiser(x_k, t, denoiser.null_labels(count)), t)
        )
    stored = faiss.read_index(str(public_bundle / "knowledge_base" / "keys.faiss")).reconstruct_n(0, count)
    np.testing.assert_allclose(keys.numpy(), stored, rtol=1e-2, atol=1e-3)
    assert (base.labels == images.labels[reference]).all()
    assert (base.manifest.k, base.manifest.v, base.manifest.timesteps) == (800, 200, 1000)
    # latents are normalised with the statistics of the other part
    everything = bundle.component("autoencoder", Autoencoder).encode(
        to_unit_range(images.images[split["pre_training"]])
    )
    torch.testing.assert_close(everything.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-3)
    torch.testing.assert_close(everything.std((0, 2, 3)), torch.ones(3), rtol=0, atol=1e-3)


def written(folder: Path) -> dict[Path, int]:
    """When each file was written last; versions of filelock differ in whether they write the lock anew."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


def test_what_is_done_is_not_done_again(tmp_path: Path, letters: Path, tiny_settings: RapidSettings) -> None:
    out = tmp_path / "out"
    build_public_bundle([letters], out, tiny_settings, CPU, resume=False)
    before = written(out)
    assert not list((out / "checkpoints").glob("*.pt"))
    with pytest.raises(InputError, match="--resume"):
        build_public_bundle([letters], out, tiny_settings, CPU, resume=False)
    build_public_bundle([letters], out, tiny_settings, CPU, resume=True)
    assert written(out) == before
    # as if it had been stopped after the autoencoder
    for name in ("denoiser", "encoder", "knowledge_base"):
        shutil.rmtree(out / name)
    (out / "config.json").unlink()
    with pytest.raises(InputError, match="not finished"):
        Bundle.open(out, "model")
    build_public_bundle([letters], out, tiny_settings, CPU, resume=True)
    weights = out / "autoencoder" / "diffusion_pytorch_model.safetensors"
    assert weights.stat().st_mtime_ns == before[weights]
    assert len(open_knowledge_base(Bundle.open(out, "model"))) == 18


def test_other_settings_images_or_contents_are_refused(
    tmp_path: Path, public_bundle: Path, letters: Path, digits: Path, tiny_settings: RapidSettings
) -> None:
    other = apply_overrides(tiny_settings.model_dump(mode="json"), ["retrieval.k=700"])
    with pytest.raises(InputError, match=r"settings\.retrieval\.k"):
        build_public_bundle([letters], public_bundle, other, CPU, resume=True)
    with pytest.raises(InputError, match="public"):
        build_public_bundle([digits], public_bundle, tiny_settings, CPU, resume=True)
    # private training and sampling are not decided by the public stage
    other = apply_overrides(tiny_settings.model_dump(mode="json"), ["private.steps=7", "generation.steps=7"])
    assert (
        build_public_bundle([letters], public_bundle, other, CPU, resume=True).settings_as(RapidSettings)
        == tiny_settings
    )
    (tmp_path / "thing.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match="holds other files"):
            build_public_bundle([letters], tmp_path, tiny_settings, CPU, resume=resume)
    assert [p.name for p in tmp_path.iterdir()] == ["thing.txt"]


def test_foreign_and_damaged_parts_are_refused(
    tmp_path: Path, public_bundle: Path, tiny_settings: RapidSettings
) -> None:
    swapped = tmp_path / "swapped"
    shutil.copytree(public_bundle, swapped)
    shutil.rmtree(swapped / "denoiser")
    Denoiser.build(tiny_settings, 13).save(swapped / "denoiser")
    with pytest.raises(InputError, match="denoiser/ is missing or not the one"):
        Bundle.open(swapped, "model")
    # even if the configuration is made to fit, the knowledge base knows its networks
    config = json.loads((swapped / "config.json").read_text())
    config["components"]["denoiser"] = content_hash(swapped / "denoiser")
    (swapped / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="denoiser"):
        open_knowledge_base(Bundle.open(swapped, "model"))
    damaged = tmp_path / "damaged"
    shutil.copytree(public_bundle, damaged)
    values = damaged / "knowledge_base" / "values.npy"
    values.write_bytes(values.read_bytes()[:-7])
    with pytest.raises(InputError, match="knowledge_base"):
        open_knowledge_base(Bundle.open(damaged, "model"))
    for content, told in (("{}", "made by another version"), ('{"format": 2}', "damaged or of another version")):
        (damaged / "config.json").write_text(content)
        with pytest.raises(InputError, match=told):
            Bundle.open(damaged, "model")


def test_two_sets_of_other_size_are_joined_with_classes_apart(
    tmp_path: Path, letters: Path, tiny_settings: RapidSettings
) -> None:
    other = tmp_path / "devanagari.npz"
    rng = np.random.default_rng(0)
    np.savez(other, images=rng.integers(0, 256, (40, 32, 32), np.uint8), labels=np.arange(40) % 2, classes=["A", "ka"])
    bundle = build_public_bundle([letters, other], tmp_path / "out", tiny_settings, CPU, resume=False)
    assert bundle.config.classes[:2] == ("letters/A", "letters/B")
    assert bundle.config.classes[-2:] == ("devanagari/A", "devanagari/ka")
    assert bundle.config.public.pre_training + bundle.config.public.reference == 100
    assert bundle.component("denoiser", Denoiser).num_classes == 15


def test_retrieval_accuracy(public_bundle: Path, letters: Path, tiny_settings: RapidSettings) -> None:
    """Of D_pre against D_ref, with a search by hand over keys from the faiss file."""
    bundle = Bundle.open(public_bundle, "base")
    found = RetrievalAccuracy(**bundle.config.facts["retrieval"])
    pre = np.load(public_bundle / "split.npz")["pre_training"]
    images = fit_images(load_images(letters, "-"), tiny_settings.image, "-")
    assert images.labels is not None
    assert found.queries == len(pre) == 42
    generator = torch.Generator().manual_seed(6)
    order = torch.randperm(42, generator=generator).numpy()
    latents = bundle.component("autoencoder", Autoencoder).encode(to_unit_range(images.images[pre[order]]))
    k, denoiser = torch.full((42,), tiny_settings.retrieval.k), bundle.component("denoiser", Denoiser)
    schedule = Schedule.build(tiny_settings.schedule)
    x_k = schedule.diffuse(latents, torch.randn(latents.shape, generator=generator), k)
    with torch.no_grad():
        encoder = bundle.component("encoder", TrajectoryEncoder)
        queries = encoder(schedule.denoise(x_k, denoiser(x_k, k, denoiser.null_labels(42)), k))
    stored = faiss.read_index(str(public_bundle / "knowledge_base" / "keys.faiss"))
    nearest = torch.cdist(queries, torch.from_numpy(stored.reconstruct_n(0, stored.ntotal))).argsort(1).numpy()
    labels, wanted = open_knowledge_base(bundle).labels, images.labels[pre[order]]
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
        ("probe.training.learning_rate=1e-4", {"autoencoder", "denoiser", "encoder", "knowledge base"}),
        ("augmentations.augment.rotate=1", {"probe"}),
        ("split.seed=1", set()),
    ],
)
def test_networks_of_another_bundle(
    tmp_path: Path,
    public_bundle: Path,
    letters: Path,
    tiny_settings: RapidSettings,
    changed: str,
    taken: set[str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What depends on a changed setting is trained; the bundle is the one that is made without the other."""
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), [changed])
    capfd.readouterr()
    bundle = build_public_bundle(
        [letters], tmp_path / "with", settings, CPU, resume=False, networks=open_networks(public_bundle)
    )
    bars = {line.split(":")[0].strip() for line in capfd.readouterr().err.replace("\r", "\n").split("\n")}
    made = {*NETWORKS, "knowledge base"}
    assert bars & made == made - taken
    alone = build_public_bundle([letters], tmp_path / "alone", settings, CPU, resume=False)
    assert set(bundle.config.components) == {*NETWORKS, "knowledge_base", "subspace", "thumbnails"}
    assert bundle.config.recipes == alone.config.recipes
    for name, kind in (NETWORKS | {"subspace": Subspace}).items():
        own, other = (list(one.component(name, kind).state_dict().values()) for one in (bundle, alone))
        assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True))
    entries = np.arange(len(open_knowledge_base(bundle)))
    values = [open_knowledge_base(one).values(entries) for one in (bundle, alone)]
    np.testing.assert_array_equal(*values)


def test_recall_of_an_approximate_index_is_measured(
    tmp_path: Path, public_bundle: Path, letters: Path, tiny_settings: RapidSettings
) -> None:
    """18 records are one list, in which everything is found."""
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), ["knowledge_base.index_type=ivf"])
    bundle = build_public_bundle(
        [letters], tmp_path / "out", settings, CPU, resume=False, networks=open_networks(public_bundle)
    )
    assert bundle.config.facts["recall"] == {"queries": 42, "neighbours": 10, "share": 1.0}
    assert "index: finds 100.0% of the 10 nearest records of 42 queries" in bundle.config.facts["findings"]
    assert "recall" not in Bundle.open(public_bundle, "base").config.facts
    exact = open_knowledge_base(Bundle.open(public_bundle, "base"))
    queries = np.random.default_rng(0).standard_normal((20, exact.manifest.key_dim)).astype(np.float32)
    np.testing.assert_array_equal(
        open_knowledge_base(bundle).search(queries, 3).indices, exact.search(queries, 3).indices
    )


def test_networks_of_other_images(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings
) -> None:
    out = tmp_path / "out"
    with pytest.raises(InputError, match=r"networks .*other images"):
        build_public_bundle([digits], out, tiny_settings, CPU, resume=False, networks=open_networks(public_bundle))
    assert not out.exists()
