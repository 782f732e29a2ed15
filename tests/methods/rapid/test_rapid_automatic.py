"""Settings that follow from public facts."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.nn import functional as F

from rapid.config.sections import ImageSettings, TonesSettings
from rapid.data import ImageSet, fit_images, load_images, sample_path, to_unit_range
from rapid.data.augmented import AugmentedImages
from rapid.diffusion.solvers import late_grid
from rapid.dp.access import PublicFacts
from rapid.dp.calibration import solve_noise_multiplier
from rapid.dp.events import dp_sgd_event
from rapid.dp.gradients import BookKeeper
from rapid.errors import InputError
from rapid.methods import apply_overrides
from rapid.methods.base import Choice, Resources, Tree
from rapid.methods.rapid.automatic import FLOOR, _components, _order, _patch_moment, choose_public
from rapid.methods.rapid.automatic_private import choose_private, seconds_per_gradient
from rapid.methods.rapid.diagnosis import autoencoder_psnr
from rapid.methods.rapid.networks import AutoencoderRecipe, build_denoiser, train_autoencoder
from rapid.methods.rapid.settings import RapidSettings
from rapid.ranks import Ranks
from rapid.rounding import as_typed
from rapid.stages.automatic import AutomaticChoice
from rapid.training import Checkpoint

CPU = torch.device("cpu")


def photographs(count: int, height: int = 32, width: int = 32) -> NDArray[np.uint8]:
    """Smooth colours with some noise."""
    rng = np.random.default_rng(0)
    coarse = rng.uniform(0, 255, (count, -(-height // 8), -(-width // 8), 3))
    fine = coarse.repeat(8, 1).repeat(8, 2)[:, :height, :width]
    return np.clip(fine + rng.normal(0, 6, fine.shape), 0, 255).astype(np.uint8)


def chosen(images: NDArray[np.uint8], minutes: float = 0.01, labelled: bool = True) -> tuple[Tree, RapidSettings]:
    labels = np.arange(len(images)) % 3 if labelled else None
    found = choose_public([ImageSet(images, labels, ("a", "b", "c") if labelled else ())], Resources(CPU, minutes), {})
    settings = apply_overrides(found.settings, [])
    assert isinstance(settings, RapidSettings)
    assert all(line and "\n" not in line for line in found.why)
    return found.settings, settings


def test_letters_and_photographs_get_what_suits_them() -> None:
    _, writing = chosen(load_images(sample_path("letters"), "-").images)
    _, photos = chosen(photographs(300))
    assert (writing.image.size, writing.image.channels, writing.image.fit) == (32, 1, "contain")
    assert (photos.image.size, photos.image.channels, photos.image.fit) == (32, 3, "contain")
    assert (writing.encoder.augment.flip, writing.encoder.augment.border) == (False, "black")
    assert (photos.encoder.augment.flip, photos.encoder.augment.border) == (True, "reflect")
    # images that are distilled are turned, too; mirroring them is left out, as private classes may not allow it
    assert (writing.private.distillation.augment.border, writing.private.distillation.augment.rotate) == ("black", 8)
    assert photos.private.distillation.augment == writing.private.distillation.augment.model_copy(
        update={"border": "reflect"}
    )
    # photographs that are so smooth may have 4x4 latents, by the time of a step
    assert photos.latent_size <= 8
    # writing gets a small autoencoder that is trained
    assert (writing.autoencoder.kind, writing.latent_shape) == ("kl", (4, 4, 4))
    assert photos.autoencoder.kind == "linear"
    for found in (writing, photos):
        assert found.private.tones.share > 0
        assert (found.generation.epsilon_scale, found.generation.confidence) == (1.1, 0.9)
    assert (writing.generation.public_below, writing.generation.least_accepted) == (0, 0)
    # the last of ten calls is public
    assert photos.generation.start is not None
    stride = photos.schedule.timesteps // photos.generation.steps
    grid = late_grid(photos.generation.start, stride)
    assert sum(t < photos.generation.public_below for t in grid) == 1
    assert (len(grid), photos.generation.least_accepted) == (10, 0.8)
    assert writing.probe.enabled


@pytest.mark.parametrize(("sample", "told"), [("letters", True), (None, False)])
def test_writing_is_told_of_networks_that_know_it(sample: str | None, told: bool) -> None:
    images = photographs(100)[..., 0] if sample is None else load_images(sample_path(sample), "-").images
    why = choose_public([ImageSet(images, None, ())], Resources(CPU, 0.01), {}).why
    assert any("--networks builtin:scripts" in line for line in why) is told


# 64 pixels are in test_cli_automatic
@pytest.mark.parametrize(("shape", "size"), [((20, 28), 32), ((8, 8), 16)])
def test_sizes(shape: tuple[int, int], size: int) -> None:
    _, found = chosen(photographs(200, *shape), labelled=False)
    # private images may be larger than the public ones
    assert (found.image.size, found.image.fit) == (size, "contain")
    assert not found.probe.enabled


def test_the_autoencoder_keeps_its_floor_on_other_images(tmp_path_factory: pytest.TempPathFactory) -> None:
    letters = load_images(sample_path("letters"), "-")
    red = letters.images
    # letters in two colours on a third one: no writing in black and white
    images = replace(letters, images=np.stack([red, 255 - red, red // 2], -1))
    half = len(images) // 2
    _, found = chosen(images.images[:half])
    recipe = AutoencoderRecipe(
        images="", image=found.image, views=0, augment=found.encoder.augment, autoencoder=found.autoencoder
    )
    pixels = fit_images(images, found.image, "-").images
    views = AugmentedImages(pixels[:half], np.zeros(half, np.int64), 0, found.encoder.augment, CPU)

    def psnr(**update: float) -> float:
        own = recipe.model_copy(update={"autoencoder": found.autoencoder.model_copy(update=update)})
        model = train_autoencoder(own, views, CPU, Checkpoint(tmp_path_factory.mktemp("a") / "state"))
        return autoencoder_psnr(model, pixels[half:], CPU)

    assert psnr() > FLOOR - 0.5
    assert psnr(decoder_noise=0) > FLOOR - 0.5
    # four components fewer are not enough, or there is nothing left to leave out
    if (fewer := found.autoencoder.latent_channels - 4) > 0:
        assert psnr(latent_channels=fewer, decoder_noise=0) < FLOOR + 0.5


@pytest.mark.parametrize("side", [17, 20, 28])
def test_the_floor_holds_for_the_images_in_a_frame(side: int) -> None:
    """Smaller images are padded with black, which costs no error: the images themselves have to keep the floor."""
    images = fit_images(
        ImageSet(photographs(600, side, side), None, ()), ImageSettings(size=32, channels=3, fit="contain"), "-"
    ).images
    found, told = _components(images, 4)[::2]
    order = _order(600)
    vectors = torch.linalg.eigh(_patch_moment(images[order[::2]], 4))[1].flip(1)[:, : found["latent_channels"]].float()
    held = to_unit_range(images[order[1::2]])
    rows = F.pixel_unshuffle(held, 4).movedim(1, -1)
    decoded = F.pixel_shuffle((rows @ vectors @ vectors.T).movedim(-1, 1), 4)
    start = (32 - side) // 2
    inside = ((decoded - held) ** 2)[:, :, start : start + side, start : start + side]
    psnr = 10 * math.log10(4 / float(inside.mean()))
    assert psnr > FLOOR
    # errors in the frame count as those of the images
    assert told - 0.01 < psnr < told + 1.5


def test_an_encoder_is_planned_only_where_retrieval_works() -> None:
    """A class is a colour, or a number that says nothing."""
    noise = np.random.default_rng(0).normal(0, 6, (600, 16, 16, 3))
    colours = np.random.default_rng(1).uniform(40, 215, (20, 1, 1, 3))
    labels = np.random.default_rng(2).integers(0, 20, 600)
    pixels = np.clip(colours[labels] + noise, 0, 255).astype(np.uint8)
    found = {}
    for name, own in (("on", labels), ("off", np.random.default_rng(3).permutation(labels))):
        images = ImageSet(pixels, own, tuple(map(str, range(20))))
        choice = choose_public([images], Resources(CPU, 0.05), {})
        found[name] = choice.settings, apply_overrides(choice.settings, []), choice.why[-1]
    for name, enabled in (("on", True), ("off", False)):
        tree, settings, line = found[name]
        assert isinstance(settings, RapidSettings)
        assert settings.retrieval.enabled is enabled
        assert ("training" in tree["encoder"]) is enabled
        assert ("encoder" in line) is enabled
        assert (settings.private.objective, settings.generation.retrieval) == ("late", "moments")


@given(
    size=st.integers(1, 10**7),
    epsilon=st.floats(0.01, 100),
    gradients=st.floats(1, 1e9),
    classes=st.integers(0, 1000),
    moments=st.booleans(),
)
def test_private_settings_fit_the_images_and_the_time(
    size: int, epsilon: float, gradients: float, classes: int, moments: bool
) -> None:
    base = apply_overrides({"method": "rapid"}, ["private.moments.share=0.3"] if moments else [])
    assert isinstance(base, RapidSettings)
    facts = PublicFacts(size, tuple(map(str, range(classes))), (32, 32, 3))
    choice = choose_private(base, facts, epsilon, gradients)
    own = choice.settings["private"]
    assert f" and epsilon {as_typed(epsilon)}, of " in choice.why[0]
    settings = apply_overrides({"method": "rapid", "private": own}, []).private
    assert 1 <= own["expected_batch"] <= max(1, size // 4)
    work = own["expected_batch"] * own["multiplicity"] * own["steps"]
    assert work <= max(gradients, own["steps"])
    assert own["moments"]["share"] == (0.3 if moments else 0)
    if moments:
        # two plain gradients take the time of a clipped one
        warmup = own["moments"]["warmup"]
        work += 0.5 * warmup["steps"] * warmup["batch_size"]
        distilled = own.get("distillation", {"training": {"steps": 0, "batch_size": 0}, "candidates": 0})
        # a network call takes a third of the time of a plain gradient
        trained = distilled["training"]["steps"] * distilled["training"]["batch_size"]
        work += 0.5 * trained + base.generation.steps / 6 * distilled["candidates"]
        assert work <= max(gradients, own["steps"]) + 256
        # with one class there is nothing to select by, and few candidates of a class are no picture of it
        assert distilled["candidates"] == 0 or (classes > 1 and distilled["candidates"] >= 32 * classes)
        assert distilled["candidates"] > 0 or classes < 2 or classes > 300 or gradients < 30_000 * classes
    assert settings.model_dump()["steps"] == own["steps"]
    # noise of standard deviation 1 / (0.03 epsilon) at the very least, over N, is larger than 0.02
    toned = base.model_copy(update={"private": base.private.model_copy(update={"tones": TonesSettings(share=0.03)})})
    tones = choose_private(toned, facts, epsilon, gradients).settings["private"].get("tones")
    if size * epsilon < 1 / 0.03 / 0.02:
        assert tones == {"share": 0.0}
    if size * epsilon > 1e5:
        assert tones is None
    more = choose_private(base, facts, 2 * epsilon, gradients).settings["private"]
    assert more["steps"] >= own["steps"]


def made_of(size: int, epsilon: float, draws: float) -> tuple[int, int, int]:
    """Multiplicity, images and steps where a step has about so many draws."""
    base = apply_overrides({"method": "rapid"}, [])
    assert isinstance(base, RapidSettings)
    facts = PublicFacts(size, (), (32, 32))
    steps = choose_private(base, facts, epsilon, 1e6).settings["private"]["steps"]
    own = choose_private(base, facts, epsilon, draws * steps).settings["private"]
    assert own["steps"] == steps
    return own["multiplicity"], own["expected_batch"], steps


@pytest.mark.parametrize(("size", "epsilon", "draws"), [(14_000, 1.0, 5000), (2000, 0.3, 1200), (60_000, 0.1, 8000)])
def test_images_are_drawn_often_where_the_noise_follows_their_number(size: int, epsilon: float, draws: float) -> None:
    multiplicity, batch, steps = made_of(size, epsilon, draws)
    assert multiplicity == 4
    fewer, more = (noise_of_mean(size, epsilon, number, steps) for number in (batch, 4 * batch))
    assert fewer < 4**0.3 * more


@pytest.mark.parametrize(("size", "epsilon", "draws"), [(10_000, 10.0, 800), (60_000, 10.0, 4000), (10_000, 3.0, 600)])
def test_many_images_are_drawn_where_the_noise_has_its_least_size(size: int, epsilon: float, draws: float) -> None:
    multiplicity, batch, steps = made_of(size, epsilon, draws)
    assert multiplicity == 1
    more, fewer = (noise_of_mean(size, epsilon, number, steps) for number in (batch, batch // 4))
    assert fewer > 4**0.3 * more


def noise_of_mean(size: int, epsilon: float, batch: int, steps: int) -> float:
    """In a mean of gradients of length 1, by numerical composition."""
    event = partial(dp_sgd_event, sample_rate=batch / size, steps=steps)
    return solve_noise_multiplier(event, epsilon, 1 / size / 10) / batch


def test_what_was_set_of_the_image_is_planned_for() -> None:
    """Settings of the network follow from the size that the images will have, not from the one that would be chosen."""
    images = [ImageSet(photographs(60, 96, 96), None, ())]
    small = apply_overrides(choose_public(images, Resources(CPU, 0.01), {}).settings, [])
    large = choose_public(images, Resources(CPU, 0.01), {"size": 128, "fit": "pad"})
    found = apply_overrides(large.settings, [])
    assert isinstance(found, RapidSettings)
    assert isinstance(small, RapidSettings)
    assert (small.image.size, found.image.size, found.image.fit, found.image.channels) == (64, 128, "pad", 3)
    assert found.latent_size <= 16
    assert large.why[0].startswith("images: 128x128, colour")


@pytest.mark.parametrize("writing", [True, False])
@pytest.mark.parametrize("size", [5, 12, 24, 28, 30, 40, 50])
def test_any_size_can_be_set(size: int, writing: bool) -> None:
    """Latents have a side that divides it, and an odd side is not halved."""
    pixels = fit_images(load_images(sample_path("letters"), "letters"), ImageSettings(size=32), "letters").images[:200]
    images = ImageSet(pixels if writing else photographs(60), None, ())
    found = choose_public([images], Resources(CPU, 0.01), {"size": size})
    settings = apply_overrides(found.settings, [])
    assert isinstance(settings, RapidSettings)
    assert settings.image.size == size
    assert settings.autoencoder.kind == ("kl" if writing and size % 4 == 0 and size >= 16 else "linear")
    assert 4 <= settings.latent_size <= 32
    network = build_denoiser(settings, 2)
    x = torch.zeros(1, *settings.latent_shape)
    assert network(x, torch.tensor([5]), torch.tensor([1])).shape == x.shape


def test_a_size_without_divisors_is_refused() -> None:
    with pytest.raises(InputError, match=r"image\.size: 37 has no divisor from 4 to 32, .*; use 48"):
        choose_public([ImageSet(photographs(60), None, ())], Resources(CPU, 0.01), {"size": 37})


def test_the_private_stage_keeps_the_views_that_suit_the_public_images() -> None:
    _, photos = chosen(photographs(300))
    found = choose_private(photos, PublicFacts(50_000, ("a", "b"), (32, 32, 3)), 10.0, 1e6).settings["private"]
    distilled = apply_overrides({"method": "rapid", "private": found}, []).private.distillation
    assert distilled.candidates > 0
    assert distilled.augment == photos.private.distillation.augment


def planned(classes: int, gradients: float, processes: int = 1) -> Choice:
    base = apply_overrides(
        {"method": "rapid", "autoencoder": {"kind": "linear", "patch": 2}},
        ["private.moments.share=0.3", "generation.probe_guidance=0.5", "generation.enough_accepted=0.33",
         "generation.confidence=0.9", "generation.least_accepted=0.8", "generation.steps=10"],
    )  # fmt: skip
    assert isinstance(base, RapidSettings)
    facts = PublicFacts(50_000, tuple(map(str, range(classes))), (32, 32, 3))
    return choose_private(base, facts, 10.0, gradients, processes)


def test_levels_leave_time_for_private_training() -> None:
    few, many, none = planned(10, 200_000), planned(100, 130_000), planned(10, 500)
    assert "generation" not in few.settings
    for found in (many, none):
        assert found.settings["generation"] == {"enough_accepted": 0, "least_accepted": 0, "confidence": 0}
        assert any("levels of guidance" in line for line in found.why)
    own = many.settings["private"]
    assert own["expected_batch"] * own["multiplicity"] * own["steps"] > 0.6 * 130_000
    assert none.too_short
    assert few.too_short == many.too_short == ""


@pytest.mark.parametrize(
    ("draws", "told"),
    [(0.5, "less than 1 gradient a step"), (1.5, "1 gradient a step"), (31.5, "31 gradients a step"), (33, "")],
)
def test_a_plan_with_too_few_gradients_is_refused(draws: float, told: str) -> None:
    base = apply_overrides({"method": "rapid"}, [])
    assert isinstance(base, RapidSettings)
    facts = PublicFacts(14_000, (), (32, 32))
    steps = choose_private(base, facts, 1.0, 1e6).settings["private"]["steps"]
    found = choose_private(base, facts, 1.0, draws * steps)
    assert told in found.too_short
    assert bool(told) == bool(found.too_short)
    if told:
        request = AutomaticChoice("rapid", (), 0.5, print)
        with pytest.raises(InputError, match=r"^minutes 0\.5: leave time for .*--set private\.expected_batch=N$"):
            request.private_settings(base, facts, 1.0, draws * steps, {}, Ranks())
        batch = AutomaticChoice("rapid", ("private.expected_batch=100",), 0.5, print)
        own = batch.private_settings(base, facts, 1.0, draws * steps, {}, Ranks()).private
        assert own.model_dump()["expected_batch"] == 100
        # a run that was begun goes on
        request.private_settings(base, facts, 1.0, 0.0, base.model_dump(mode="json"), Ranks())


def test_the_first_of_several_processes_works_alone_in_its_own_time() -> None:
    def alone(processes: int) -> float:
        own = planned(10, 4e5, processes).settings["private"]
        warmup, distilled = own["moments"]["warmup"], own["distillation"]["training"]
        return 0.6 * (warmup["steps"] * warmup["batch_size"] + distilled["steps"] * distilled["batch_size"])

    # each of four processes has a quarter of the gradients, and the levels take four times as much of all
    assert alone(4) == pytest.approx(alone(1) / 4, rel=0.15)


def test_the_time_of_a_gradient_is_measured() -> None:
    settings = apply_overrides({"method": "rapid"}, ["denoiser.channels=16", "denoiser.heads=2"])
    assert isinstance(settings, RapidSettings)
    assert 0 < seconds_per_gradient(settings, CPU, count=8) < 10


def test_as_many_gradients_are_measured_as_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, clipped_sum = [], BookKeeper.clipped_sum

    def limited(self: BookKeeper, losses: Any, count: int, *arguments: Any) -> Any:
        sizes.append(count)
        if count > 5:
            raise torch.OutOfMemoryError
        return clipped_sum(self, losses, count, *arguments)

    monkeypatch.setattr(BookKeeper, "clipped_sum", limited)
    settings = apply_overrides({"method": "rapid"}, ["denoiser.channels=16", "denoiser.heads=2"])
    assert isinstance(settings, RapidSettings)
    assert 0 < seconds_per_gradient(settings, CPU, count=16) < 10
    assert list(dict.fromkeys(sizes)) == [16, 8, 4]
