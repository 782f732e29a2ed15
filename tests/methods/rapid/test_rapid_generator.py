"""The Generator: network calls, seeds, labels, samplers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from rapid.bundle.format import Bundle
from rapid.config.presets import generation_settings
from rapid.config.sections import GenerationSettings
from rapid.errors import InputError
from rapid.methods.rapid.generator import Generator, streams
from rapid.nn import Denoiser

CPU = torch.device("cpu")


def make(bundle: Bundle, **changes: object) -> Generator:
    settings = GenerationSettings.model_validate(bundle.settings.generation.model_dump() | changes)
    return Generator(bundle, CPU, settings)


@pytest.mark.parametrize(("retrieval", "calls"), [("query", (20, 20)), ("class", (0, 20)), ("none", (80, 20))])
def test_network_calls(private: Bundle, retrieval: str, calls: tuple[int, int]) -> None:
    """100 steps, k = 0.8 T, v = 0.2 T: 20 public calls for the query and 20 private ones, 40 in all; 20 without."""
    generator = make(private, retrieval=retrieval, attempts=1)
    counts = {"public": 0, "private": 0}
    for name, network in (("public", generator._public_denoiser), ("private", generator._denoiser)):
        assert isinstance(network, Denoiser)
        network.register_forward_hook(lambda *_, name=name: counts.update({name: counts[name] + 1}))
    generator.generate(3, seed=1)
    assert (counts["public"], counts["private"]) == calls


@pytest.mark.parametrize("sampler", ["ddim", "pndm", "dpm-solver++"])
def test_image_n_of_a_seed_does_not_depend_on_the_batch(private: Bundle, sampler: str) -> None:
    whole = make(private, sampler=sampler).generate(13, seed=11)
    again = make(private, sampler=sampler).generate(13, seed=11)
    assert whole.images.tobytes() == again.images.tobytes()
    for size in (1, 4):
        parts = make(private, sampler=sampler, batch_size=size).generate(13, seed=11)
        assert abs(parts.images.astype(int) - whole.images).max() <= 1
    plain, first = (make(private, sampler=sampler, attempts=1).generate(count, seed=11) for count in (13, 1))
    assert abs(first.images.astype(int) - plain.images[:1]).max() <= 1
    assert (make(private, sampler=sampler).generate(13, seed=12).images != whole.images).any()


def test_shapes_labels_and_progress(private: Bundle) -> None:
    generator = make(private, batch_size=5, attempts=1)
    seen: list[tuple[int, int]] = []
    samples = generator.generate(12, progress=lambda done, total: seen.append((done, total)))
    assert samples.images.shape == (12, 32, 32) == (12, *generator.image_shape)
    assert samples.images.dtype == np.uint8
    assert samples.labels is not None
    assert samples.labels.tolist() == [*range(10), 0, 1]
    assert seen == [(5, 12), (10, 12), (12, 12)]
    assert generator.generate(2, [7, 7], samples.seed).labels.tolist() == [7, 7]


def test_guidance(private: Bundle) -> None:
    """Scale 0 is the null class whatever the label, 1 the label alone, and what lies beyond is extrapolated."""
    from rapid.methods.rapid.generator import guided

    denoiser = private.denoiser()
    x, t = torch.randn(4, *private.settings.latent_shape), torch.full((4,), 50)
    labels = torch.tensor([0, 1, 2, 3])
    with torch.no_grad():
        conditional, null = denoiser(x, t, labels), denoiser(x, t, denoiser.null_labels(4))
        for scale in (0.0, 1.0, 2.5):
            expected = null + scale * (conditional - null)
            torch.testing.assert_close(guided(denoiser, x, t, labels, scale), expected, rtol=1e-3, atol=1e-5)


def test_epsilon_scale_leaves_more_variance(private: Bundle) -> None:
    """The latents of the same noise spread further, the more so the larger the scale."""

    def spread(scale: float) -> float:
        generator = make(private, epsilon_scale=scale)
        labels = np.arange(64) % 10
        start = generator.start(streams(3, np.arange(64)), labels)
        return float(generator.finish(start.x, labels).var(0).sum())

    assert spread(0.95) < spread(1.0) < spread(1.05) < spread(1.1)


def test_images_may_begin_later_than_training_did(private: Bundle) -> None:
    settings = private.settings.model_copy(
        update={"private": private.settings.private.model_copy(update={"start": 600})}
    )
    further = Bundle(private.path, private.config.model_copy(update={"settings": settings}), private.privacy)
    for start, expected in ((None, 600), (600, 600), (400, 400), (200, 200)):
        generator = make(further, start=start)
        assert generator.begin == expected
        begun = generator.start(streams(1, np.arange(2)), np.array([1, 2]))
        assert begun.retrieved is not None
        values = private.knowledge_base().values(begun.retrieved.indices)
        assert np.array_equal(begun.x.numpy(), values) == (expected == 200)


@pytest.mark.parametrize("start", [1, 201])
def test_a_start_beyond_the_late_steps_is_refused(private: Bundle, start: int) -> None:
    with pytest.raises(InputError, match=r"generation\.start must lie in 200\.\.200"):
        generation_settings(private.settings, [f"generation.start={start}"])


def test_a_public_bundle_can_be_sampled(public_bundle: Path) -> None:
    generator = Generator.open(public_bundle, "cpu")
    assert generator.privacy is None
    assert generator.generate(2, seed=0).images.shape == (2, 32, 32)


def test_labels_are_names_first_and_numbers_second(private: Bundle) -> None:
    generator = make(private)
    assert generator.resolve_labels(["3", 4, "0"]) == [3, 4, 0]
    generator.classes = ("one", "0", "2")
    assert generator.resolve_labels(["0", 0, "one", "2", 1]) == [1, 0, 0, 2, 1]
    for bad in ("11", "x", "-1", "", "9" * 5000):
        with pytest.raises(InputError, match="the model knows one, 0, 2"):
            generator.resolve_labels([bad])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"count": 0}, "--count 0"),
        ({"count": 3, "labels": [1]}, "1 given for 3"),
        ({"count": 1, "seed": -1}, "--seed -1"),
        ({"count": 1, "seed": 2**63}, "--seed"),
    ],
)
def test_bad_arguments(private: Bundle, arguments: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        make(private).generate(**arguments)


def test_retrieved_entries_are_the_nearest(private: Bundle) -> None:
    generator = make(private)
    found = generator.start(streams(5, np.arange(6)), None).retrieved
    assert found is not None
    assert found.denoised is not None
    base = private.knowledge_base()
    queries = private.encoder()(found.denoised).detach().numpy()
    assert (base.search(queries).indices[:, 0] == found.indices).all()
    np.testing.assert_array_equal(base.values(found.indices), found.values.numpy())


def test_entries_of_the_right_classes(private: Bundle, public_bundle: Path) -> None:
    """By class, a public model starts from entries of the class itself, a private one from classes that look alike."""
    public = Generator(
        Bundle.open(public_bundle, "-"), CPU, GenerationSettings(sampler="ddim", retrieval="class", attempts=1)
    )
    labels = np.unique(public.bundle.knowledge_base().labels)[:4]
    found = public.start(streams(3, np.arange(4)), labels).retrieved
    assert found is not None
    assert (public.bundle.knowledge_base().labels[found.indices] == labels).all()
    generator = make(private, retrieval="class")
    entries = generator._entries
    assert entries is not None
    wanted = np.arange(40) % 10
    start = generator.start(streams(3, np.arange(40)), wanted)
    assert start.retrieved is not None
    assert generator.begin == private.settings.retrieval.v
    probe = private.probe()
    assert probe is not None
    likeness = probe.resemblance().numpy()
    there = likeness[:, np.unique(private.knowledge_base().labels)].sum(1) > 0
    assert there.all()
    assert (likeness[wanted, private.knowledge_base().labels[start.retrieved.indices]] > 0).all()
    np.testing.assert_array_equal(private.knowledge_base().values(start.retrieved.indices), start.x.numpy())


def test_each_image_is_diffused_on_with_its_own_noise(private: Bundle) -> None:
    generator = make(private)
    plain = generator.start(streams(7, np.arange(3)), None)
    settings = private.settings.model_copy(
        update={"private": private.settings.private.model_copy(update={"start": 600})}
    )
    later = Bundle(private.path, private.config.model_copy(update={"settings": settings}), private.privacy)
    generator = Generator(later, CPU, generator.settings)
    start = generator.start(streams(7, np.arange(3)), None)
    assert generator.begin == 600
    assert start.retrieved is not None
    assert plain.retrieved is not None
    assert (start.retrieved.indices == plain.retrieved.indices).all()
    alone = generator.start(streams(7, np.array([2])), None)
    torch.testing.assert_close(alone.x, start.x[2:])
    assert not torch.allclose(start.x, start.retrieved.values)
    assert generator.generate(2, seed=1).images.shape == (2, 32, 32)


def test_several_neighbours(private: Bundle) -> None:
    """The entry is among the nearest of the same query, and not always the first."""
    settings = private.settings.model_copy(
        update={"private": private.settings.private.model_copy(update={"neighbours": 5})}
    )
    bundle = Bundle(private.path, private.config.model_copy(update={"settings": settings}), private.privacy)
    generator = Generator(bundle, CPU, private.settings.generation)
    found = generator.start(streams(5, np.arange(12)), None).retrieved
    assert found is not None
    assert found.denoised is not None
    with torch.no_grad():
        queries = bundle.encoder()(found.denoised).numpy()
    nearest = bundle.knowledge_base().search(queries, 5).indices
    places = (nearest == found.indices[:, None]).argmax(1)
    assert (nearest[np.arange(12), places] == found.indices).all()
    assert len(set(places.tolist())) > 2
    alone = generator.start(streams(5, np.array([7])), None).retrieved
    assert alone is not None
    assert alone.indices[0] == found.indices[7]
