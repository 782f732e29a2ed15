"""Tones: the released histogram of pixels, and the curve that gives it to generated images."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from methods.tiny import TINY
from scipy.optimize import linprog

from rapid.bundle import Bundle
from rapid.config.sections import TonesSettings
from rapid.data import ImageSet, fit_images, load_images
from rapid.data.private import PrivateImages
from rapid.dp import PrivateAccess, PublicFacts, calibrate
from rapid.methods import apply_overrides, generator_of
from rapid.methods.rapid.generator import RapidSampler
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.settings import RapidSettings
from rapid.sampling.generate import generate
from rapid.sampling.one_call import OneCallTrajectories
from rapid.sampling.streams import make_streams
from rapid.sampling.without_probe import WithoutProbe
from rapid.stages.private import train_private_bundle
from rapid.stages.public import build_public_bundle
from rapid.tones.curve import LEVELS, ToneCurve
from rapid.tones.fit import STEEPEST, classes_by, fit_tones, gentle, matching_table, released_tones
from rapid.tones.release import Tones, image_row, is_hidden, release_tones, tones_specs
from rapid.tones.shares import INNER, bins_of_levels, likely_shares, nearest_distribution, shares_of_bins
from rapid.training import RunFolder

CPU = torch.device("cpu")
BINS = INNER + 2


def opened(tmp_path: Path, images: np.ndarray, epsilon: float) -> PrivateAccess:
    (spec,) = tones_specs(TonesSettings(share=0.5), len(images))
    return PrivateAccess(
        ImageSet(images, None, (), ""),
        PublicFacts(len(images), (), images.shape[1:]),
        calibrate([spec.model_copy(update={"share": None})], epsilon=epsilon, delta=1e-5),
        RunFolder(tmp_path),
        device=CPU,
    )


def released(tmp_path: Path, images: np.ndarray, epsilon: float) -> Tones | None:
    return release_tones(opened(tmp_path, images, epsilon))


def test_black_and_white_have_bins_of_their_own() -> None:
    bins = bins_of_levels()
    assert np.bincount(bins).tolist() == pytest.approx([1, *[254 / 32] * 32, 1], abs=1)
    assert (np.diff(bins) >= 0).all()


@given(st.integers(0, 4), st.sampled_from([(3, 5), (4, 4, 3), (1, 1)]), st.integers(0, 99))
def test_a_row_is_the_histogram_of_one_image(count: int, shape: tuple[int, ...], seed: int) -> None:
    images = np.random.default_rng(seed).integers(0, 256, (count, *shape), np.uint8)
    rows, channels = image_row(torch.from_numpy(images)).numpy(), shape[2] if len(shape) == 3 else 1
    assert rows.shape == (count, channels * BINS)
    assert (np.linalg.norm(rows, axis=1) <= 1 + 1e-6).all()
    edges = np.concatenate([[0], np.flatnonzero(np.diff(bins_of_levels())) + 1, [LEVELS]])
    for image, row in zip(
        images.reshape(count, shape[0] * shape[1], channels), rows.reshape(count, channels, BINS), strict=True
    ):
        for channel in range(channels):
            found = np.histogram(image[:, channel], edges)[0] / len(image)
            assert row[channel] * channels**0.5 == pytest.approx(found, abs=1e-6)


@given(arrays(np.float64, st.integers(1, 12), elements=st.floats(-3, 3)))
def test_the_nearest_distribution(row: np.ndarray) -> None:
    """Of a convex set, p is nearest to r exactly if (r - p) (q - p) <= 0 for all q, here the corners of the simplex."""
    found = nearest_distribution(row)
    assert (found >= 0).all()
    assert found.sum() == pytest.approx(1)
    assert ((row - found) @ (np.eye(len(row)) - found).T <= 1e-9).all()


def some_shares(seed: int, spread: float) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(BINS, spread))


@given(st.integers(0, 999), st.floats(0.01, 3), st.floats(0.01, 3), st.floats(0, 1))
def test_likely_shares_are_a_distribution(seed: int, spread: float, own_spread: float, noise: float) -> None:
    true, own = some_shares(seed, spread), some_shares(seed + 1000, own_spread)
    found = true + noise * np.random.default_rng(seed).normal(size=BINS)
    likely = likely_shares(found, own, noise)
    assert likely.shape == (BINS,)
    assert (likely >= 0).all()
    assert likely.sum() == pytest.approx(1)
    assert likely_shares(true, own, 0.0) == pytest.approx(true, abs=1e-9)


def test_shares_of_which_noise_tells_nothing_are_those_of_the_images() -> None:
    own = some_shares(0, 3)
    assert likely_shares(own, own, 0.01) == pytest.approx(own)
    assert likely_shares(some_shares(1, 3), own, 10.0) == pytest.approx(own)


@pytest.mark.parametrize("noise", [0.003, 0.01, 0.02])
@pytest.mark.parametrize("brighter", [0, 10])
def test_likely_shares_are_nearer_than_the_nearest_distribution(noise: float, brighter: int) -> None:
    """Private images are darker in the middle, as bright or brighter; by the earth mover's distance between levels."""
    rng = np.random.default_rng(2)

    def cumulative(levels: np.ndarray) -> np.ndarray:
        return shares_of_bins(np.bincount(levels.round().clip(1, 254).astype(int), minlength=LEVELS)).cumsum()

    background = rng.normal(200, 15, 60_000)
    true = cumulative(np.concatenate([background + brighter, rng.normal(90, 10, 15_000)]))
    own = np.diff(cumulative(np.concatenate([background, rng.normal(110, 25, 15_000)])), prepend=0)
    errors = []
    for _ in range(20):
        found = np.diff(true, prepend=0) + noise * rng.normal(size=BINS)
        pair = likely_shares(found, own, noise), nearest_distribution(found)
        errors.append([np.abs(one.cumsum() - true).sum() for one in pair])
    likely, nearest = np.mean(errors, 0)
    assert likely < 0.9 * nearest


@pytest.mark.parametrize("noise", [0.001, 0.003, 0.008])
def test_drawings_in_black_and_white_are_known_by_what_was_found(noise: float) -> None:
    """A decoder draws strokes of MNIST's kind with soft edges, on a ground that is nearly black: levels 1 to 12."""
    rng = np.random.default_rng(3)
    true = np.concatenate([[0.81], np.full(29, 0.105 / 29), np.full(3, 0.025), [0.01]])
    soft = np.concatenate([rng.integers(0, 13, 50_000), rng.integers(0, 230, 12_000)])
    own = shares_of_bins(np.bincount(soft, minlength=LEVELS))
    errors = []
    for _ in range(20):
        found = true + noise * rng.normal(size=BINS)
        likely = likely_shares(found, own, noise)
        assert likely == pytest.approx(nearest_distribution(found))
        errors.append(np.abs((likely - true).cumsum()).sum())
    assert np.mean(errors) < np.abs((own - true).cumsum()).sum() / 3


@given(st.integers(0, 999), st.integers(1, 200), st.floats(0.01, 3))
def test_matched_pixels_have_the_other_distribution(seed: int, values: int, spread: float) -> None:
    """No cumulative share differs by more than the pixels of one level, which all become one level."""
    rng = np.random.default_rng(seed)
    pixels = rng.choice(rng.integers(0, 256, values), 4000)
    shares = rng.dirichlet(np.full(BINS, spread))
    table = matching_table(np.bincount(pixels, minlength=LEVELS), shares)
    assert (np.diff(table.astype(int)) >= 0).all()
    found = np.bincount(bins_of_levels()[table[pixels]], minlength=BINS) / len(pixels)
    largest = np.bincount(pixels).max() / len(pixels)
    # levels are rounded, by half a level of a bin of eight
    assert np.abs(found.cumsum() - shares.cumsum()).max() <= largest / 2 + shares.max() / 14 + 1e-9


def test_matching_its_own_distribution_changes_little() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, 100_000)
    counts = np.bincount(pixels, minlength=LEVELS)
    shares = np.bincount(bins_of_levels(), counts) / counts.sum()
    assert np.abs(matching_table(counts, shares).astype(int) - np.arange(LEVELS)).max() <= 1


@settings(max_examples=20)
@given(st.integers(0, 999), st.integers(1, 255))
def test_a_gentle_curve_is_the_nearest_that_is_not_steep(seed: int, values: int) -> None:
    """Linear programming finds none that is nearer: unknowns are the curve and its distances from the other one."""
    rng = np.random.default_rng(seed)
    table = np.sort(rng.choice(rng.integers(0, 256, values), LEVELS))
    counts = rng.integers(0, 100, LEVELS) * rng.integers(0, 2, LEVELS)
    found = gentle(table.astype(np.uint8), counts).astype(int)
    assert (np.diff(found) >= 0).all()
    assert np.diff(found).max() <= STEEPEST
    same, rise = np.eye(LEVELS), np.diff(np.eye(LEVELS), axis=0)
    none = np.zeros_like(rise)
    best = linprog(
        np.concatenate([np.zeros(LEVELS), counts + 1.0]),
        np.block([[same, -same], [-same, -same], [rise, none], [-rise, none]]),
        np.concatenate([table, -table, np.full(LEVELS - 1, STEEPEST), np.zeros(LEVELS - 1)]),
    )
    assert ((counts + 1) * np.abs(found - table)).sum() == pytest.approx(best.fun)


def test_the_release_is_the_mean_histogram_unless_noise_hides_it(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (3000, 6, 6, 3), np.uint8)
    images[..., 2] //= 2
    found = released(tmp_path / "much", images, 1e5)
    assert found is not None
    rows = image_row(torch.from_numpy(images)).double().numpy() * 3**0.5
    assert found.shares == pytest.approx(rows.mean(0).reshape(3, BINS), abs=1e-3)
    assert found.noise < 1e-3
    assert released(tmp_path / "little", images, 0.05) is None


def test_the_noise_is_that_of_the_shares(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2000, 4, 4, 3), np.uint8)
    true = (image_row(torch.from_numpy(images)).double().mean(0) * 3**0.5).numpy().reshape(3, BINS)
    errors, noise = [], set()
    for number in range(6):
        found = released(tmp_path / str(number), images, 3.0)
        assert found is not None
        errors.append((found.shares - true).flatten())
        noise.add(found.noise)
    (stated,) = noise
    # 612 numbers, whose deviation itself has one of 2.9 %
    assert np.std(errors) == pytest.approx(stated, rel=0.16)


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3)])
def test_tones_are_hidden_from_a_fiftieth_on(shape: tuple[int, ...]) -> None:
    multiplier = 0.02 * 1000 / math.sqrt(shape[2] if len(shape) == 3 else 1)
    assert not is_hidden(0.999 * multiplier, 1000, shape)
    assert is_hidden(1.001 * multiplier, 1000, shape)


def test_a_difference_counts_by_as_much_as_noise_does_not_explain() -> None:
    """The first division, between black and the rest, by hand: the noise of 33 bins, of which a 34th is usual."""
    own, more, noise = np.full(BINS, 1 / BINS), 0.2, 0.03
    found = own - more / (BINS - 1)
    found[0] = own[0] + more
    variance = noise**2 * ((1 - 1 / BINS) ** 2 + (BINS - 1) / BINS**2)
    assert likely_shares(found, own, noise)[0] == pytest.approx(1 / BINS + more * (1 - variance / more**2))
    # no larger than its deviation, it counts for nothing
    assert likely_shares(found, own, 1.02 * more)[0] == pytest.approx(1 / BINS)


class Painter(WithoutProbe):
    """Red, green and blue have levels of their own, each equally often: 20 to 59, 100 to 139 and 180 to 219."""

    classes = ()
    image_shape = latent_shape = (6, 6, 3)
    steps = max_steps = 1
    batch_size = 64
    bundle: Bundle

    def calls(self, steps: int | None = None) -> int:
        return 1

    def trajectories(self) -> OneCallTrajectories:
        return OneCallTrajectories(lambda streams, _: torch.from_numpy(np.stack([self._drawn(s) for s in streams])))

    def decode(self, latents: torch.Tensor) -> np.ndarray:
        return latents.numpy()

    def _drawn(self, stream: np.random.Generator) -> np.ndarray:
        return (stream.integers(20, 60, self.image_shape) + np.array([0, 80, 160])).astype(np.uint8)


def test_each_channel_gets_its_own_tones() -> None:
    """Red becomes lighter by 60 levels, green stays as it is, and blue becomes darker by 100."""
    moves = np.array([60, 0, -100])
    levels = np.arange(20, 60)[None] + np.array([[0], [80], [160]])
    shares = [shares_of_bins(np.bincount(row, minlength=LEVELS)) for row in levels + moves[:, None]]
    tables = fit_tones(Painter(), Tones(np.array(shares), 0.0)).numpy().astype(int)
    for table, row, move in zip(tables, levels, moves, strict=True):
        # a bin has eight levels
        assert np.abs(table[row] - (row + move)).max() <= 8


@pytest.fixture(scope="module")
def toned(
    tmp_path_factory: pytest.TempPathFactory, public_bundle: Bundle, digits: Path, tiny_settings: RapidSettings
) -> Bundle:
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), ["private.tones.share=0.3"])
    return train_private_bundle(
        public_bundle,
        PrivateImages(digits),
        tmp_path_factory.mktemp("toned") / "out",
        settings,
        epsilon=200.0,
        delta=None,
        device=CPU,
        resume=False,
    )


def test_images_get_the_tones_of_the_private_ones(toned: Bundle, digits: Path) -> None:
    statement = json.loads((toned.path / "privacy.json").read_text())
    assert "tones" in [release["name"] for release in statement["releases"]]
    drawn = generate(generator_of(toned, CPU), 100, seed=1).images
    plain = replace(Parts.of(toned), tones=None)
    sampler = RapidSampler(plain, CPU, plain.settings.generation)
    labels = np.arange(100) % len(plain.classes)
    untoned = sampler.decode(sampler.sample(make_streams(1, np.arange(100)), labels)[1])
    real = load_images(digits, "private").images
    black, without, wanted = ((some == 0).mean() for some in (drawn, untoned, np.pad(real, ((0, 0), (2, 2), (2, 2)))))
    assert abs(without - wanted) > 0.6
    assert abs(black - wanted) < 0.2


@pytest.mark.parametrize("method", ["dp-diffusion", "dp-gan", "dpdm"])
def test_each_method_that_makes_images_can_have_tones(tmp_path: Path, letters: Path, digits: Path, method: str) -> None:
    """After some steps images are noise, but as many pixels are black as a curve can make."""
    tiny, base = TINY[method], None
    tree = tiny["settings"] | (tiny["public"] or {}) | {"method": method}
    settings = apply_overrides(tree, [])
    if tiny["public"] is not None:
        base = build_public_bundle([letters], tmp_path / "base", settings, device=CPU, resume=False).path
    real = (fit_images(load_images(digits, "private"), settings.image, "private").images == 0).mean()
    far = []
    for share in (0, 0.3):
        found = train_private_bundle(
            base,
            PrivateImages(digits),
            tmp_path / f"model-{share}",
            apply_overrides(tree, [f"private.tones.share={share}"]),
            epsilon=200.0,
            delta=None,
            device=CPU,
            resume=False,
        )
        assert found is not None
        statement = json.loads((found.path / "privacy.json").read_text())
        assert ("tones" in [release["name"] for release in statement["releases"]]) == (share > 0)
        far.append(abs((generate(generator_of(found, CPU), 200, seed=1).images == 0).mean() - real))
    assert far[1] < far[0] / 2


@given(st.lists(st.floats(0, 5), min_size=1, max_size=9).filter(lambda some: sum(some) > 0.1), st.integers(1, 99))
def test_classes_are_as_frequent_as_whole_numbers_can_be(frequencies: list[float], count: int) -> None:
    found = classes_by(np.array(frequencies), count)
    assert len(found) == count
    wanted = count * np.array(frequencies) / sum(frequencies)
    assert (np.abs(np.bincount(found, minlength=len(wanted)) - wanted) <= 1 + 1e-9).all()


def test_tones_are_those_of_the_classes_that_are_frequent(toned: Bundle) -> None:
    """Drawn as often as they are among private images, classes of a perfect model need no curve."""
    plain = replace(Parts.of(toned), tones=None)
    sampler = RapidSampler(plain, CPU, plain.settings.generation.model_copy(update={"attempts": 1}))
    frequencies = np.array([0.9, 0.1, *np.zeros(len(plain.classes) - 2)])
    images = generate(sampler, 512, classes_by(frequencies, 512), seed=0).images
    counts = np.bincount(images.flatten(), minlength=LEVELS)
    (table,) = fit_tones(sampler, Tones(shares_of_bins(counts)[None], 0.0), frequencies)
    own = matching_table(counts, shares_of_bins(counts))
    assert (table.numpy() == gentle(own, counts)).all()


def test_public_records_keep_their_tones(toned: Bundle) -> None:
    records = np.arange(3)
    parts = Parts.of(toned)
    found = [
        RapidSampler(some, CPU, parts.settings.generation).record_images(records)
        for some in (parts, replace(parts, tones=None))
    ]
    np.testing.assert_array_equal(*found)


def test_too_much_noise_leaves_images_as_they_are(tmp_path: Path, private: Bundle) -> None:
    access = opened(tmp_path, np.zeros((3000, 6, 6), np.uint8), 0.02)
    curve = released_tones(access, lambda: generator_of(private, CPU))["tones"]
    planes = torch.randint(256, (2, 1, 5, 5), dtype=torch.uint8)
    assert torch.equal(curve(planes), planes)


@pytest.mark.filterwarnings("error:private.tones.share:UserWarning")
def test_a_share_that_is_spent_for_nothing_is_warned_of_first(tmp_path: Path, digits: Path) -> None:
    """The warning is an error here: the run ends with it, and nothing was charged or written."""
    settings = apply_overrides(TINY["dpdm"]["settings"] | {"method": "dpdm"}, ["private.tones.share=0.03"])
    ledger, out = tmp_path / "ledger.jsonl", tmp_path / "out"
    with pytest.raises(
        UserWarning, match=r"private\.tones\.share=0\.03 would be spent for nothing: at epsilon 1\.0049 .* 100 im"
    ):
        train_private_bundle(
            None, PrivateImages(digits), out, settings, epsilon=1.0049, delta=None, device=CPU, resume=False,
            ledger=ledger,
        )  # fmt: skip
    assert not ledger.exists()
    assert not out.exists()


@given(st.integers(1, 3), st.integers(0, 3), st.integers(0, 99))
def test_a_curve_maps_each_channel_by_its_own_table(channels: int, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    curve = ToneCurve({"channels": channels})
    curve.table.copy_(torch.from_numpy(rng.integers(0, 256, (channels, LEVELS), np.uint8)))
    planes = rng.integers(0, 256, (count, channels, 3, 2), np.uint8)
    found = curve(torch.from_numpy(planes)).numpy()
    for number in range(channels):
        np.testing.assert_array_equal(found[:, number], curve.table[number].numpy()[planes[:, number]])
