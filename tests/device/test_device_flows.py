"""Every flow on a device: a tensor on the wrong one is an error, and results are those of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device import flows, recorded
from device.child import on_device
from methods.tiny import TINY
from safetensors.torch import load_file
from tests_support import assert_same_images

from rapid.bundle import Bundle
from rapid.config.sections import MethodSettings
from rapid.methods import apply_overrides
from rapid.methods.rapid.settings import RapidSettings

CPU = torch.device("cpu")
SAMPLERS = ("ddim", "pndm", "dpm-solver++")
RETRIEVALS = {
    # with settings of which each needs other tensors
    "query": ["generation.guidance=2", "generation.clip_range=3"],
    "class": [],
    "none": ["generation.epsilon_scale=1.1", "generation.public_below=100", "generation.probe_guidance=0.5"],
}
OBJECTIVES = {
    "rapid": ["private.neighbours=3", "private.start=300", "private.precision=bfloat16"],
    "late": [
        "private.label_dropout=0.5",
        "private.tones.share=0.2",
        "generation.probe_guidance=0.5",
        "generation.enough_accepted=0.3",
    ],
    "ldm": [
        "private.moments.share=0.2",
        "private.moments.warmup.steps=2",
        "private.distillation={candidates: 20, keep: 1, votes_share: 0.1, guidance: 1.5, training: {steps: 2}}",
        "generation.retrieval=moments",
    ],
}


def changed(settings: MethodSettings, overrides: list[str]) -> MethodSettings:
    return apply_overrides(settings.model_dump(mode="json"), overrides)


def weights(bundle: Path, component: str) -> dict[str, torch.Tensor]:
    (file,) = (bundle / component).glob("*.safetensors")
    return load_file(file)


def test_build_kb_stops_resumes_and_makes_the_bundle_of_a_cpu(
    tmp_path: Path, letters: Path, public_bundle: Path, tiny_settings: RapidSettings
) -> None:
    out = tmp_path / "public"
    on_device(flows.build, letters, out, tiny_settings, 5)
    for component in ("autoencoder", "denoiser", "encoder", "probe", "subspace"):
        expected = weights(public_bundle, component)
        for name, tensor in weights(out, component).items():
            # softmax does not see a bias of keys: its gradient is rounding alone, which Adam makes whole steps of
            if not name.endswith("to_k.bias"):
                torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-4, msg=f"{component} {name}")
    assert Bundle.open(out, "out", "public").config.components.keys() == (
        Bundle.open(public_bundle, "out", "public").config.components.keys()
    )


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_each_private_objective_trains_stops_and_resumes(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings, objective: str
) -> None:
    chosen = changed(tiny_settings, [f"private.objective={objective}", *OBJECTIVES[objective]])
    # the probe takes three steps; the second step of the denoiser is the last before it stops
    stop = 5 if objective != "ldm" else 7
    images = on_device(flows.train, public_bundle, digits, tmp_path / "private", chosen, stop)
    assert_same_images(images, flows.sample(CPU, tmp_path / "private", [], len(images)))


@pytest.mark.parametrize("retrieval", RETRIEVALS)
def test_generate_makes_the_images_of_a_cpu(private_bundle: Path, retrieval: str) -> None:
    cases = [
        ["generation.steps=20", f"generation.retrieval={retrieval}", f"generation.sampler={sampler}", *more]
        for sampler, more in zip(SAMPLERS, (RETRIEVALS[retrieval], [], []), strict=True)
    ]
    for found, overrides in zip(on_device(flows.sample_many, private_bundle, cases, 3), cases, strict=True):
        assert_same_images(found, flows.sample(CPU, private_bundle, overrides, 3))


def test_a_public_bundle_makes_the_images_of_a_cpu(public_bundle: Path) -> None:
    cases = [["generation.steps=20", "generation.retrieval=class"]]
    (found,) = on_device(flows.sample_many, public_bundle, cases, 3)
    assert_same_images(found, flows.sample(CPU, public_bundle, cases[0], 3))


def test_the_engine_makes_the_images_of_a_cpu(private_bundle: Path) -> None:
    counts = (3, 1, 4)
    found, record = on_device(flows.serve, private_bundle, counts)
    expected, same = flows.serve(CPU, private_bundle, counts)
    for one, other in zip([*found, record], [*expected, same], strict=True):
        assert_same_images(one, other)


def test_a_device_that_breaks_down_makes_the_server_not_ready(private_bundle: Path) -> None:
    assert on_device(flows.break_while_serving, private_bundle) == (True, False, "refused")


def test_evaluate_makes_the_report_of_a_cpu(digits: Path, letters: Path, private_bundle: Path) -> None:
    found = on_device(flows.evaluate, digits, digits, letters, private_bundle)
    expected = flows.evaluate(CPU, digits, digits, letters, private_bundle)
    assert found["device"] == "pretend:0"
    assert json.dumps(found["copies"]) == json.dumps(expected["copies"])
    for measure in ("precision", "recall", "density", "coverage", "frechet"):
        same = pytest.approx(expected["fidelity"]["synthetic"][measure], abs=1e-6)
        assert found["fidelity"]["synthetic"][measure] == same


@pytest.mark.parametrize("method", sorted(TINY))
def test_each_method_trains_and_generates(tmp_path: Path, letters: Path, digits: Path, method: str) -> None:
    tiny = TINY[method]
    tree = tiny["settings"] | (tiny["public"] or {}) | {"method": method}
    more = [] if method == "dp-classifier" else ["private.tones.share=0.2"]
    settings = apply_overrides(tree, ["private.precision=bfloat16", *more])
    base = None
    if tiny["public"] is not None:
        base = tmp_path / "base"
        on_device(flows.build, letters, base, settings, 1)
    found = on_device(flows.train, base, digits, tmp_path / "private", settings, 2)
    assert_same_images(found, flows.sample(CPU, tmp_path / "private", [], len(found)))


def test_a_classifier_warms_up_and_mixes_in_public_gradients(tmp_path: Path, letters: Path) -> None:
    tree = TINY["dp-classifier"]["settings"] | {"method": "dp-classifier"}
    settings = apply_overrides(tree, ["private.public_share=0.5", "private.public_batch=4", "warmup.kept=20"])
    on_device(flows.build, letters, tmp_path / "base", settings, 1)
    found = on_device(flows.train, tmp_path / "base", letters, tmp_path / "private", settings)
    np.testing.assert_allclose(found, flows.sample(CPU, tmp_path / "private", [], len(found)), atol=1e-5)


def recorded_without_waits(*arguments: Any) -> Any:
    found, captured, waits = on_device(recorded.run, *arguments)
    assert captured > 0
    assert waits == []
    return found


@pytest.mark.parametrize("objective", ["late", "ldm"])
def test_what_is_recorded_of_other_releases_does_not_wait_either(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings, objective: str
) -> None:
    """Moments, distillation with guidance, votes, tones, and images that the probe guides."""
    overrides = [f"private.objective={objective}", "private.steps=6", *OBJECTIVES[objective]]
    settings = changed(tiny_settings, overrides)
    found = recorded_without_waits(flows.train, public_bundle, digits, tmp_path / "private", settings)
    assert_same_images(found, flows.sample(CPU, tmp_path / "private", [], len(found)))


def test_batches_of_endless_images_replay_what_the_first_ones_recorded(private_bundle: Path) -> None:
    few, captured, waits = on_device(recorded.run, flows.endless, private_bundle, 3)
    more, as_many, _ = on_device(recorded.run, flows.endless, private_bundle, 6)
    assert captured == as_many > 0
    assert waits == []
    assert_same_images(more, flows.endless(CPU, private_bundle, 6))
    assert_same_images(more[: len(few)], few)


@pytest.mark.parametrize("method", ["rapid", *sorted(TINY)])
def test_what_is_recorded_does_not_wait_for_the_host(
    tmp_path: Path, letters: Path, digits: Path, tiny_settings: RapidSettings, method: str
) -> None:
    """Public and private trainings and sampling, with as many steps as it takes until sizes come again."""
    settings, base = tiny_settings, tmp_path / "base"
    if method != "rapid":
        tiny = TINY[method]
        settings = apply_overrides(tiny["settings"] | (tiny["public"] or {}) | {"method": method}, [])
    settings = changed(settings, ["private.steps=6"])
    built = method == "rapid" or TINY[method]["public"] is not None
    if built:
        recorded_without_waits(flows.build, letters, base, settings)
    found = recorded_without_waits(flows.train, base if built else None, digits, tmp_path / "private", settings)
    assert_same_images(found, flows.sample(CPU, tmp_path / "private", [], len(found)))
