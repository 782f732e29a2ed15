"""Select and distil: which images are kept, what is learned from them, and that it costs no privacy."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from rapid.bundle import Bundle
from rapid.data import to_unit_range
from rapid.data.private import PrivateImages
from rapid.diffusion import Schedule
from rapid.diffusion.losses import noise_prediction_loss
from rapid.errors import InputError, Stopped
from rapid.methods import apply_overrides
from rapid.methods.rapid.candidates import draw_candidates, surest
from rapid.methods.rapid.distillation import chosen_latents, distil
from rapid.methods.rapid.generator import RapidGenerator, RapidSampler
from rapid.methods.rapid.pace import CALL, candidate_work, other_work
from rapid.methods.rapid.parts import Parts
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser
from rapid.sampling.generate import generate
from rapid.sampling.streams import make_streams
from rapid.stages.private import train_private_bundle
from rapid.stopping import request_stop, stop_on_signal
from rapid.training import Checkpoint

CPU = torch.device("cpu")
OVERRIDES = [
    "private.distillation.candidates=40",
    "private.distillation.keep=1",
    "private.distillation.views=2",
    "private.distillation.sampling={attempts: 1, steps: 10, batch_size: 16, retrieval: class}",
    "private.distillation.training={steps: 20, batch_size: 16, learning_rate: 0.003, warmup_steps: 2, ema_decay: 0.5}",
    "generation.retrieval=none",
    "generation.steps=8",
]


def own_settings(tiny: RapidSettings, *more: str) -> RapidSettings:
    made = apply_overrides(tiny.model_dump(mode="json"), [*OVERRIDES, *more])
    assert isinstance(made, RapidSettings)
    return made


@pytest.fixture(scope="module")
def parts(private: Bundle, tiny_settings: RapidSettings) -> Parts:
    """Those of a bundle without distillation, with settings that ask for it."""
    return replace(Parts.of(private), settings=own_settings(tiny_settings))


@given(
    npst.arrays(np.float32, st.tuples(st.integers(1, 30), st.integers(1, 4)), elements=st.floats(0, 1, width=32)),
    st.sampled_from([0.1, 0.5, 0.8, 1.0]),
    st.integers(0, 3),
)
def test_the_surest_of_each_class_are_kept(probabilities: NDArray[np.float32], keep: float, first: int) -> None:
    wanted = (first + np.arange(len(probabilities))) % probabilities.shape[1]
    rows, labels = surest(probabilities, wanted, keep)
    assert len(set(rows.tolist())) == len(rows)
    for number in range(probabilities.shape[1]):
        own = [row for row, one in enumerate(probabilities) if int(one.argmax()) == number == wanted[row]]
        chosen = rows[labels == number].tolist()
        assert len(chosen) == (max(1, round(keep * len(own))) if own else 0)
        assert set(chosen) <= set(own)
        left = [probabilities[row].max() for row in own if row not in chosen]
        assert not left or min(probabilities[row].max() for row in chosen) >= max(left)


def test_what_is_kept_are_images_of_the_model_and_views_of_them(parts: Parts) -> None:
    latents, labels, weights = chosen_latents(parts, draw_candidates(parts, CPU), None, CPU, 0)
    assert len(latents) == len(labels) == len(weights)
    # all classes that are kept equally often
    totals = np.bincount(labels, weights)
    assert totals[totals > 0] == pytest.approx(totals.max())
    assert latents.shape[1:] == parts.settings.latent_shape
    first, second, third = np.split(labels, 3)
    assert (first == second).all() and (first == third).all()
    # the images themselves come first; each is a candidate that the probe takes for its class
    sampling, probe = parts.settings.private.distillation.sampling, parts.probe
    assert sampling is not None
    assert probe is not None
    sampler = RapidSampler(parts, CPU, sampling)
    candidates = to_unit_range(sampler.decode(sampler.sample(make_streams(0, np.arange(40)), np.arange(40) % 10)[1]))
    distances = torch.cdist(latents[: len(first)].flatten(1), parts.autoencoder.encode(candidates).detach().flatten(1))
    assert distances.min(1).values.max() < 1e-2
    assert (probe.probabilities(candidates).argmax(1).numpy()[distances.argmin(1).numpy()] == first).all()
    assert not torch.allclose(latents[: len(first)], latents[len(first) : 2 * len(first)], atol=1e-2)


def test_training_lowers_the_loss_on_what_is_kept(parts: Parts, tmp_path: Path) -> None:
    latents, labels, _ = chosen_latents(parts, draw_candidates(parts, CPU), None, CPU, 0)
    trained = distil(parts, CPU, states(tmp_path / "state"))
    schedule = Schedule.build(parts.settings.schedule)
    generator = torch.Generator().manual_seed(9)
    t = torch.randint(1, schedule.timesteps + 1, (len(latents),), generator=generator)
    eps = torch.randn(latents.shape, generator=generator)

    @torch.no_grad()
    def loss(denoiser: Denoiser) -> float:
        return float(noise_prediction_loss(denoiser, schedule, latents, torch.from_numpy(labels), t, eps).mean())

    assert loss(trained) < 0.97 * loss(parts.denoiser)
    # the denoiser that was given stays as it was
    again = distil(parts, CPU, states(tmp_path / "again"))
    assert all(torch.equal(a, b) for a, b in zip(trained.parameters(), again.parameters(), strict=True))


def with_distillation(parts: Parts, **changes: object) -> Parts:
    own = parts.settings.private.distillation.model_copy(update=changes)
    private = parts.settings.private.model_copy(update={"distillation": own})
    return replace(parts, settings=parts.settings.model_copy(update={"private": private}))


def test_guidance_moves_classes_apart_in_the_last_round_after_dp_sgd(parts: Parts, tmp_path: Path) -> None:
    @torch.no_grad()
    def apart(denoiser: Denoiser) -> float:
        return float((denoiser(x, t, labels) - denoiser(x, t, denoiser.null_labels(40))).square().mean())

    torch.manual_seed(0)
    x, t, labels = torch.randn(40, *parts.settings.latent_shape), torch.full((40,), 300), torch.arange(40) % 10
    # long enough that guidance stands out from what differs between the private trainings, whose noise has no seed
    training = parts.settings.private.distillation.training.model_copy(update={"steps": 100})
    trained = {
        (when, guidance): distil(
            with_distillation(parts, rounds=2, rounds_before=1, guidance=guidance, training=training),
            CPU, states(tmp_path / when / f"{guidance:g}"), when,
        )
        for when in ("before", "after")
        for guidance in (1.0, 4.0)
    }  # fmt: skip
    assert apart(trained["after", 4.0]) > 1.2 * apart(trained["after", 1.0])
    assert apart(trained["before", 4.0]) == apart(trained["before", 1.0])
    plain, guided = (Checkpoint(tmp_path / "after" / name / "distillation-after-0").load() for name in ("1", "4"))
    assert plain is not None
    assert guided is not None
    assert all(torch.equal(guided["network"][name], tensor) for name, tensor in plain["network"].items())


@pytest.fixture(scope="module")
def distilled(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    out = tmp_path_factory.mktemp("distilled") / "private"
    return train_private_bundle(
        public_bundle,
        PrivateImages(digits),
        out,
        own_settings(tiny_settings),
        epsilon=10.0,
        delta=None,
        device=CPU,
        resume=False,
    )


def test_without_a_probe_nothing_is_distilled(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path: Path
) -> None:
    """The early steps of its images are the public denoiser's then, as without the setting."""
    settings = own_settings(tiny_settings, "private.probe.share=0")
    bundle = train_private_bundle(
        public_bundle,
        PrivateImages(digits),
        tmp_path / "out",
        settings,
        epsilon=10.0,
        delta=None,
        device=CPU,
        resume=False,
    )
    assert Parts.of(bundle).private_from == settings.late_start
    assert "surest" not in (bundle.path / "README.md").read_text()


def test_where_the_probe_takes_few_images_for_their_class_nothing_is_distilled(parts: Parts, tmp_path: Path) -> None:
    own = parts.settings.private.distillation.model_copy(
        update={"least_accepted": 1.0, "rounds": 0, "rounds_before": 1}
    )
    private = parts.settings.private.model_copy(update={"distillation": own})
    parts = replace(parts, settings=parts.settings.model_copy(update={"private": private}))
    with pytest.warns(UserWarning, match=r"the probe takes \d+% of the images for their class: no more is distilled"):
        assert distil(parts, CPU, states(tmp_path), "before") is parts.denoiser


def test_it_costs_no_privacy(distilled: Bundle, private: Bundle) -> None:
    """The account has the same releases and the same epsilon as that of a run without distillation."""
    with_it, without = (json.loads((one.path / "privacy.json").read_text()) for one in (distilled, private))
    assert [one["name"] for one in with_it["releases"]] == [one["name"] for one in without["releases"]]
    assert with_it["epsilon"] == without["epsilon"]
    assert "its own images that the probe was surest of" in " ".join((distilled.path / "README.md").read_text().split())


def test_dp_sgd_begins_from_what_was_distilled_before_it(
    public_bundle: Path, digits: Path, tiny_settings: RapidSettings, tmp_path: Path
) -> None:
    """Steps of DP-SGD too small to change anything leave the denoiser that the first rounds alone would give."""
    settings = own_settings(
        tiny_settings,
        "private.distillation.rounds=0",
        "private.distillation.rounds_before=2",
        "private.learning_rate=1e-12",
    )
    bundle = train_private_bundle(
        public_bundle,
        PrivateImages(digits),
        tmp_path / "out",
        settings,
        epsilon=10.0,
        delta=None,
        device=CPU,
        resume=False,
    )
    parts = Parts.of(bundle)
    # its early steps are the public denoiser's, as those of a model that nothing was distilled into after DP-SGD
    assert parts.private_from == settings.late_start
    assert "Before DP-SGD the denoiser was trained on" in (bundle.path / "README.md").read_text()
    assert parts.probe is not None
    begun = parts.public_denoiser.with_classes(10)
    begun.blend_classes(parts.public_denoiser, parts.probe.resemblance())
    expected = distil(replace(parts, denoiser=begun), CPU, states(tmp_path / "state"), "before")
    # bundles hold single precision; DP-SGD moves each weight by at most its learning rate a step
    assert all(
        torch.allclose(a, b, atol=1e-6) for a, b in zip(parts.denoiser.parameters(), expected.parameters(), strict=True)
    )
    assert not all(
        torch.allclose(a, b, atol=1e-3) for a, b in zip(begun.parameters(), expected.parameters(), strict=True)
    )


def test_images_are_sampled_by_the_distilled_denoiser_from_noise(distilled: Bundle) -> None:
    generator = RapidGenerator(distilled, CPU)
    (phase,) = generator.route()
    assert phase.networks == ("private",) * 8
    samples = generate(generator, 3, seed=1, labels=[0, 1, 2])
    assert samples.images.shape == (3, 32, 32)


def states(folder: Path) -> Callable[[str], Checkpoint]:
    folder.mkdir(parents=True, exist_ok=True)
    return lambda name: Checkpoint(folder / name)


class StopsOnce(Checkpoint):
    """Requests a stop when the state is saved for the fifth time."""

    saves = 0

    def save(self, state: dict[str, Any]) -> None:
        super().save(state)
        self.saves += 1
        if self.saves == 5:
            request_stop()


@pytest.mark.parametrize("stopped_rounds", [["distillation-after-0"], ["distillation-after-0", "distillation-after-1"]])
def test_a_run_that_was_stopped_gives_the_same_denoiser(
    parts: Parts, tmp_path: Path, stopped_rounds: list[str]
) -> None:
    parts = with_distillation(parts, rounds=2)
    quiet, saved = distil(parts, CPU, states(tmp_path / "quiet")), tmp_path / "saved"
    for stops in stopped_rounds:
        with pytest.raises(Stopped), stop_on_signal():
            distil(parts, CPU, lambda name, at=stops: (StopsOnce if name == at else Checkpoint)(saved / name, 0))
    resumed = distil(parts, CPU, states(saved))
    assert all(torch.equal(a, b) for a, b in zip(quiet.parameters(), resumed.parameters(), strict=True))


def test_rounds_after_dp_sgd_cannot_be_left_out(tiny_settings: RapidSettings) -> None:
    with pytest.raises(InputError, match=r"least_accepted must be 0 with rounds after DP-SGD"):
        own_settings(tiny_settings, "private.distillation.least_accepted=0.4")


def test_guidance_needs_the_null_class(tiny_settings: RapidSettings) -> None:
    with pytest.raises(InputError, match=r"guidance must be 1 without label_dropout"):
        own_settings(tiny_settings, "private.distillation.guidance=2", "private.distillation.label_dropout=0")


def test_guidance_is_in_the_planned_time(tiny_settings: RapidSettings) -> None:
    """A network call more for each image that the last round trains on, or for each step of sampling."""
    plain = own_settings(tiny_settings, "private.distillation.rounds=2")
    guided = own_settings(tiny_settings, "private.distillation.rounds=2", "private.distillation.guidance=1.5")
    assert other_work(guided) - other_work(plain) == pytest.approx(CALL * 20 * 16)
    sampled = plain.generation.model_copy(update={"guidance": 2.0})
    assert candidate_work(plain, sampled) == 2 * candidate_work(plain, plain.generation)


def test_sampling_of_candidates_is_checked_as_that_of_images(tiny_settings: RapidSettings) -> None:
    with pytest.raises(InputError, match=r"private.distillation.sampling.steps must be at most 1000"):
        own_settings(tiny_settings, "private.distillation.sampling.steps=1001")
