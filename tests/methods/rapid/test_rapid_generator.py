"""RapidGenerator: network calls, samplers, seeds, initialisation, records."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from rapid_variants import CPU, make, with_private
from tests_support import assert_same_images

from rapid.bundle import Bundle
from rapid.config.presets import generation_settings
from rapid.errors import InputError
from rapid.methods.rapid.generator import PRIVATE, PUBLIC, Initialisation, RapidGenerator
from rapid.methods.rapid.knowledge_base import open_knowledge_base
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser, TrajectoryEncoder
from rapid.nn.denoiser import guided
from rapid.probe.network import CONSTANT, Probe
from rapid.sampling.generate import generate
from rapid.sampling.streams import make_streams


def start(generator: RapidGenerator, seed: int, numbers: list[int], labels: list[int] | None = None) -> Initialisation:
    """Where the late steps of some candidates start."""
    chosen = None if labels is None else np.array(labels)
    return generator.sample(make_streams(seed, np.array(numbers)), chosen)[0]


@pytest.mark.parametrize(("retrieval", "calls"), [("query", (20, 20)), ("class", (0, 20)), ("none", (80, 20))])
def test_network_calls(private: Bundle, retrieval: str, calls: tuple[int, int]) -> None:
    """100 steps, k = 0.8 T, v = 0.2 T: 20 public calls for the query and 20 private ones, 40 in all; 20 without."""
    generator = make(private, retrieval=retrieval, attempts=1, steps=100)
    counts = {PUBLIC: 0, PRIVATE: 0}
    for name, network in generator._denoisers.items():
        network.register_forward_hook(lambda *_, name=name: counts.update({name: counts[name] + 1}))
    generate(generator, 3, seed=1)
    assert (counts[PUBLIC], counts[PRIVATE]) == calls
    assert generator.calls() == sum(calls)


@pytest.mark.parametrize(("below", "late"), [(0, (0, 20)), (41, (4, 16)), (200, (19, 1))])
def test_the_public_denoiser_takes_the_steps_below_a_timestep(
    private: Bundle, below: int, late: tuple[int, int]
) -> None:
    """Late steps are at 200, 190 .. 10, one at least by the bundle's own denoiser, and all in the same order."""
    generator = make(private, retrieval="class", attempts=1, steps=100, public_below=below)
    called: list[tuple[str, int]] = []
    for name, network in generator._denoisers.items():
        network.register_forward_hook(lambda _, given, __, name=name: called.append((name, int(given[1][0]))))
    generate(generator, 2, seed=1)
    assert called == [(PUBLIC if t < below else PRIVATE, t) for t in range(200, 0, -10)]
    assert tuple(sum(name == one for name, _ in called) for one in (PUBLIC, PRIVATE)) == late


def test_a_public_end_that_leaves_no_step_is_refused(private: Bundle) -> None:
    with pytest.raises(InputError, match=r"generation\.public_below must be at most 200 \(where"):
        generation_settings(private.settings_as(RapidSettings), ["generation.public_below=201"])


@pytest.mark.parametrize("sampler", ["ddim", "pndm", "dpm-solver++"])
def test_image_n_of_a_seed_does_not_depend_on_the_batch(private: Bundle, sampler: str) -> None:
    whole = generate(make(private, sampler=sampler), 13, seed=11)
    again = generate(make(private, sampler=sampler), 13, seed=11)
    assert whole.images.tobytes() == again.images.tobytes()
    for size in (1, 4):
        parts = generate(make(private, sampler=sampler, batch_size=size), 13, seed=11)
        assert_same_images(parts.images, whole.images)
    plain, first = (generate(make(private, sampler=sampler, attempts=1), count, seed=11) for count in (13, 1))
    assert_same_images(first.images, plain.images[:1])
    assert (generate(make(private, sampler=sampler), 13, seed=12).images != whole.images).any()


def test_denoised_latents_stay_within_the_clip_range(private: Bundle) -> None:
    """With one step left the result is the denoised latent itself."""
    for limit in (0.5, 2.0):
        generator = make(private, retrieval="none", attempts=1, clip_range=limit)
        _, x = generator.sample(make_streams(1, np.arange(6)), np.arange(6))
        assert float(x.abs().max()) <= limit + 1e-4
    free = make(private, retrieval="none", attempts=1).sample(make_streams(1, np.arange(6)), np.arange(6))[1]
    wide = make(private, retrieval="none", attempts=1, clip_range=1e6).sample(
        make_streams(1, np.arange(6)), np.arange(6)
    )[1]
    assert float(free.abs().max()) > 2
    assert torch.allclose(free, wide, atol=1e-2)


def test_shapes_and_labels(private: Bundle) -> None:
    generator = make(private, batch_size=5, attempts=1)
    samples = generate(generator, 12)
    assert samples.images.shape == (12, 32, 32) == (12, *generator.image_shape)
    assert samples.images.dtype == np.uint8
    assert samples.labels is not None
    assert samples.labels.tolist() == [*range(10), 0, 1]
    again = generate(generator, 2, [7, 7], samples.seed).labels
    assert again is not None
    assert again.tolist() == [7, 7]


def test_attempts_and_the_probe(private: Bundle, public_bundle: Path) -> None:
    probed = make(private, attempts=3)
    assert probed.attempts == 3
    chances = probed.label(np.zeros((2, 32, 32), np.uint8))
    assert chances is not None
    np.testing.assert_allclose(chances.sum(1), 1, rtol=1e-5)
    # as drawn none is refused, but what the probe says can be asked for
    drawn = make(private, attempts=1)
    assert (drawn.attempts, drawn.probed) == (1, True)
    np.testing.assert_array_equal(drawn.label(np.zeros((2, 32, 32), np.uint8)), chances)
    unprobed = make(Bundle.open(public_bundle, "model"), attempts=3)
    assert (unprobed.attempts, unprobed.probed) == (1, False)
    assert unprobed.label(np.zeros((2, 32, 32), np.uint8)) is None


def test_a_candidate_is_accepted_if_the_probe_is_sure_of_it(private: Bundle) -> None:
    """A probe that finds class 0 in every image, with probability .55: one class of ten accepts, unless .6 is asked."""
    shares = []
    for least in (0.0, 0.5, 0.6):
        generator = make(private, attempts=3, confidence=least)
        probe = generator._probe
        assert probe is not None
        with torch.no_grad():
            probe.head.weight.zero_()
            probe.head.weight[:, -1] = torch.tensor([0.55, *[0.05] * 9]).log() / CONSTANT
        samples = generate(generator, 20, seed=3)
        assert samples.images.shape[0] == 20
        shares.append(samples.tally.share)
    assert shares == [0.1, 0.1, 0.0]


def test_guidance(private: Bundle) -> None:
    """Scale 0 is the null class whatever the label, 1 the label alone, and larger scales extrapolate."""
    denoiser = private.component("denoiser", Denoiser)
    shape = private.settings_as(RapidSettings).latent_shape
    x, t = torch.randn(4, *shape), torch.full((4,), 50)
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
        return float(generator.sample(make_streams(3, np.arange(64)), np.arange(64) % 10)[1].var(0).sum())

    assert spread(0.95) < spread(1.0) < spread(1.05) < spread(1.1)


def test_images_may_start_later_than_training_did(private: Bundle) -> None:
    further = with_private(private, start=600)
    for given, expected in ((None, 600), (600, 600), (400, 400), (200, 200)):
        generator = make(further, start=given)
        assert generator.start == expected
        found = start(generator, 1, [0, 1], [1, 2])
        assert found.retrieved is not None
        values = open_knowledge_base(private).values(found.retrieved.records)
        assert np.array_equal(found.x.numpy(), values) == (expected == 200)


@pytest.mark.parametrize("begin", [1, 201])
def test_a_start_beyond_the_late_steps_is_refused(private: Bundle, begin: int) -> None:
    with pytest.raises(InputError, match=r"generation\.start must lie in 200\.\.200"):
        generation_settings(private.settings_as(RapidSettings), [f"generation.start={begin}"])


def test_a_public_bundle_can_be_sampled(public_bundle: Path) -> None:
    generator = RapidGenerator(Bundle.open(public_bundle, "model"), CPU)
    assert generator.bundle.privacy is None
    assert generate(generator, 2, seed=0).images.shape == (2, 32, 32)


def test_retrieved_records_are_the_nearest(private: Bundle) -> None:
    found = start(make(private), 5, [*range(6)]).retrieved
    assert found is not None
    assert found.query is not None
    base = open_knowledge_base(private)
    keys = private.component("encoder", TrajectoryEncoder)(found.query).detach().numpy()
    assert (base.search(keys).indices[:, 0] == found.records).all()
    np.testing.assert_array_equal(base.values(found.records), found.values.numpy())


def test_records_of_the_right_classes(private: Bundle, public_bundle: Path) -> None:
    """By class, a public model starts from records of the class itself, a private one from classes that look alike."""
    public = make(Bundle.open(public_bundle, "model"), retrieval="class", attempts=1)
    own = open_knowledge_base(public.bundle).labels
    labels = np.unique(own)[:4]
    found = start(public, 3, [*range(4)], labels.tolist()).retrieved
    assert found is not None
    assert (own[found.records] == labels).all()
    generator = make(private, retrieval="class")
    wanted = np.arange(40) % 10
    begun = start(generator, 3, [*range(40)], wanted.tolist())
    assert begun.retrieved is not None
    base = open_knowledge_base(private)
    likeness = private.component("probe", Probe).resemblance().numpy()
    there = likeness[:, np.unique(base.labels)].sum(1) > 0
    assert there.all()
    assert (likeness[wanted, base.labels[begun.retrieved.records]] > 0).all()
    np.testing.assert_array_equal(base.values(begun.retrieved.records), begun.x.numpy())


def test_each_image_is_diffused_to_the_start_with_its_own_noise(private: Bundle) -> None:
    plain = start(make(private), 7, [0, 1, 2])
    generator = make(with_private(private, start=600))
    later = start(generator, 7, [0, 1, 2])
    assert generator.start == 600
    assert later.retrieved is not None
    assert plain.retrieved is not None
    assert (later.retrieved.records == plain.retrieved.records).all()
    torch.testing.assert_close(start(generator, 7, [2]).x, later.x[2:])
    assert not torch.allclose(later.x, later.retrieved.values)
    assert generate(generator, 2, seed=1).images.shape == (2, 32, 32)


def test_several_neighbours(private: Bundle) -> None:
    """The record is among the nearest of the same query, and not always the first."""
    generator = make(with_private(private, neighbours=5))
    found = start(generator, 5, [*range(12)]).retrieved
    assert found is not None
    assert found.query is not None
    with torch.no_grad():
        keys = private.component("encoder", TrajectoryEncoder)(found.query).numpy()
    nearest = open_knowledge_base(private).search(keys, 5).indices
    ranks = (nearest == found.records[:, None]).argmax(1)
    assert (nearest[np.arange(12), ranks] == found.records).all()
    assert len(set(ranks.tolist())) > 2
    alone = start(generator, 5, [7]).retrieved
    assert alone is not None
    assert alone.records[0] == found.records[7]


def test_record_images(private: Bundle) -> None:
    generator = make(private)
    images = generator.record_images(np.arange(generator.records))
    assert images.shape == (generator.records, 32, 32)
    assert_same_images(generator.record_images(np.array([1]))[0], images[1])
    for bad in (-1, generator.records):
        with pytest.raises(InputError) as caught:
            generator.record_images(np.array([0, bad]))
        assert str(caught.value) == f"record {bad}: must lie in 0..{generator.records - 1}"
