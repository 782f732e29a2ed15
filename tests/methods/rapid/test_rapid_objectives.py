"""Eq. 5 and the two objectives it is compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from rapid.bundle import Bundle
from rapid.config.sections import ScheduleSettings
from rapid.diffusion import Schedule
from rapid.diffusion.losses import denoising_loss, retrieval_noise
from rapid.dp.randomness import Randomness
from rapid.methods import apply_overrides
from rapid.methods.rapid.knowledge_base import open_knowledge_base
from rapid.methods.rapid.networks import build_denoiser
from rapid.methods.rapid.objectives import PrivateObjective, Retriever, trained_timesteps
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser, TrajectoryEncoder

V = 200
SCHEDULE = Schedule.build(ScheduleSettings())


def test_at_v_the_network_sees_exactly_the_retrieved_value() -> None:
    seen: list[Tensor] = []

    class Echo:
        predicts_velocity = False

        def __call__(self, x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
            seen.append(x)
            return x

    x0, value = torch.randn(6, 3, 4, 4), torch.randn(6, 3, 4, 4)
    noise = retrieval_noise(SCHEDULE, x0, value, V)
    denoising_loss(Echo(), SCHEDULE, x0, torch.zeros(6, dtype=torch.int64), torch.full((6,), V), noise)
    torch.testing.assert_close(seen[0], value, rtol=1e-5, atol=1e-5)


def test_the_implied_noise_leads_to_the_value() -> None:
    x0, value = torch.randn(6, 3, 4, 4), torch.randn(6, 3, 4, 4)
    t = torch.full((6,), V)
    torch.testing.assert_close(SCHEDULE.diffuse(x0, SCHEDULE.implied_noise(x0, value, t), t), value)


@pytest.mark.parametrize("prediction", ["noise", "velocity"])
def test_gradient_equals_autograd_through_the_formula(tiny_settings: RapidSettings, prediction: str) -> None:
    torch.manual_seed(0)
    settings = apply_overrides(tiny_settings.model_dump(mode="json"), [f"denoiser.prediction={prediction}"])
    assert isinstance(settings, RapidSettings)
    denoiser = build_denoiser(settings, 3)
    count = 5
    x, value = torch.randn(count, *tiny_settings.latent_shape), torch.randn(count, *tiny_settings.latent_shape)
    labels, steps = torch.tensor([0, 1, 2, 3, 0]), torch.tensor([1, 50, 120, 199, 200])
    # Eq. 5 once more, scalar by scalar, with abar from the betas
    betas = np.linspace(0.0015**0.5, 0.0155**0.5, 1000) ** 2
    abar = np.concatenate([[1.0], np.cumprod(1 - betas)])
    total = torch.zeros(())
    for i in range(count):
        a, b = abar[V], abar[steps[i]]
        eps = (value[i] - a**0.5 * x[i]) / (1 - a) ** 0.5
        noisy = b**0.5 * x[i] + (1 - b) ** 0.5 * eps
        classes = denoiser.class_table(labels[i : i + 1])
        predicted = denoiser.unet(noisy[None].float(), steps[i : i + 1] - 1, class_labels=classes).sample[0]
        target = eps if prediction == "noise" else b**0.5 * eps - (1 - b) ** 0.5 * x[i]
        total = total + ((target - predicted) ** 2).mean()
    expected = torch.autograd.grad(total, list(denoiser.parameters()), allow_unused=True)
    found = torch.autograd.grad(
        denoising_loss(denoiser, SCHEDULE, x, labels, steps, retrieval_noise(SCHEDULE, x, value, V)).sum(),
        list(denoiser.parameters()),
        allow_unused=True,
    )
    whole = max(float(g.abs().max()) for g in expected if g is not None)
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            torch.testing.assert_close(mine, other.float(), rtol=1e-3, atol=1e-5 * whole)


def make_objective(bundle: Bundle, settings: RapidSettings, name: str, dropout: float = 0.0) -> PrivateObjective:
    chosen = apply_overrides(
        settings.model_dump(mode="json"), [f"private.objective={name}", f"private.label_dropout={dropout}"]
    )
    public = bundle.component("denoiser", Denoiser)
    schedule = Schedule.build(chosen.schedule)
    encoder = bundle.component("encoder", TrajectoryEncoder)
    retriever = Retriever(schedule, public, encoder, open_knowledge_base(bundle), chosen.retrieval.k)
    return PrivateObjective(chosen, public.with_classes(4), retriever if name == "rapid" else None, Randomness())


def nine_latents(settings: RapidSettings) -> Tensor:
    return torch.randn(9, *settings.latent_shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("name", "last"), [("rapid", V), ("late", V), ("ldm", 1000)])
def test_timesteps_are_uniform_up_to_the_last_that_is_trained(
    name: str, last: int, public_bundle: Path, tiny_settings: RapidSettings
) -> None:
    objective = make_objective(Bundle.open(public_bundle, "base"), tiny_settings, name)
    assert trained_timesteps(objective.settings) == last
    t = objective.draw(200_000).t.numpy()
    assert (t.min(), t.max()) == (1, last)
    assert stats.chisquare(np.bincount(t, minlength=last + 1)[1:]).pvalue > 1e-5


def test_retrieval_is_the_nearest_key(public_bundle: Path, tiny_settings: RapidSettings) -> None:
    bundle = Bundle.open(public_bundle, "base")
    objective = make_objective(bundle, tiny_settings, "rapid")
    retriever, draws = objective.retriever, objective.draw(9)
    assert retriever is not None
    latents = nine_latents(tiny_settings)
    found = retriever.retrieve(latents, draws.eps)
    # keys once more from the faiss file, and a search by hand
    import faiss

    stored = faiss.read_index(str(public_bundle / "knowledge_base" / "keys.faiss"))
    keys = torch.from_numpy(stored.reconstruct_n(0, stored.ntotal))
    values = torch.from_numpy(np.load(public_bundle / "knowledge_base" / "values.npy"))
    k = torch.full((9,), tiny_settings.retrieval.k)
    x_k = SCHEDULE.diffuse(latents, draws.eps, k)
    with torch.no_grad():
        public = bundle.component("denoiser", Denoiser)
        encoder = bundle.component("encoder", TrajectoryEncoder)
        queries = encoder(SCHEDULE.denoise(x_k, public(x_k, k, public.null_labels(9)), k))
    torch.testing.assert_close(found, values[torch.cdist(queries, keys).argmin(1)])


def test_beyond_v_the_value_is_diffused_on(public_bundle: Path, tiny_settings: RapidSettings) -> None:
    """With private.start, Eq. 5 is taken at that step: its input there is the value, further along with noise."""
    bundle = Bundle.open(public_bundle, "base")
    later = apply_overrides(tiny_settings.model_dump(mode="json"), ["private.start=600"])
    objective = make_objective(bundle, later, "rapid")
    draws = objective.draw(9)._replace(t=torch.full((9,), 600))
    assert objective.retriever is not None
    latents = nine_latents(tiny_settings)
    value = objective.retriever.retrieve(latents, draws.eps)
    betas = np.linspace(0.0015**0.5, 0.0155**0.5, 1000) ** 2
    abar = np.concatenate([[1.0], np.cumprod(1 - betas)])
    ratio = abar[600] / abar[V]
    expected = ratio**0.5 * value + (1 - ratio) ** 0.5 * draws.onward
    seen: list[Tensor] = []
    objective.denoiser.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    objective.losses(latents, torch.arange(9) % 4, draws)
    torch.testing.assert_close(seen[-1], expected.float(), rtol=1e-3, atol=1e-4)
    assert trained_timesteps(later) == 600
    t = objective.draw(20_000).t
    assert (int(t.min()), int(t.max())) == (1, 600)


def test_dropped_labels_become_the_null_class(public_bundle: Path, tiny_settings: RapidSettings) -> None:
    objective = make_objective(Bundle.open(public_bundle, "base"), tiny_settings, "ldm", dropout=0.3)
    share = objective.draw(50_000).dropped.float().mean().item()
    assert share == pytest.approx(0.3, abs=0.02)
    # give every class but the null one its own embedding: only then labels matter
    with torch.no_grad():
        objective.denoiser.class_table.weight[:4] += torch.randn(4, 1) * 5
    draws = objective.draw(9)
    dropped = draws._replace(dropped=torch.ones(9, dtype=torch.bool))
    kept = draws._replace(dropped=torch.zeros(9, dtype=torch.bool))
    latents, labels = nine_latents(tiny_settings), torch.arange(9) % 4
    null = objective.losses(latents, labels, dropped)
    assert not torch.allclose(null, objective.losses(latents, labels, kept))
    torch.testing.assert_close(null, objective.losses(latents, torch.full((9,), 4), kept))
