"""DP diffusion from public images to a report: both stages, resuming, generating, serving's protocol, refusals."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler
from methods.tiny import TINY, flags
from tests_process import Program, run
from tests_support import assert_same_images

from rapid.bundle import Bundle
from rapid.config.presets import build_settings
from rapid.data import ImageSet, load_images
from rapid.data.private import PrivateImages
from rapid.diffusion.solvers import Solver
from rapid.dp import PublicFacts
from rapid.errors import InputError
from rapid.methods import generator_of, open_generator
from rapid.methods.dp_diffusion.attacked import membership_scores
from rapid.methods.dp_diffusion.generator import PixelGenerator
from rapid.methods.dp_diffusion.networks import build_schedule
from rapid.methods.dp_diffusion.private_stage import releases, trained_parameters
from rapid.methods.dp_diffusion.settings import DpDiffusionSettings
from rapid.nn import Denoiser
from rapid.sampling.generate import generate
from rapid.sampling.streams import make_streams, normal
from rapid.stages.private import train_private_bundle
from rapid.stages.public import build_public_bundle
from rapid.training.optimizers import noisy_schedule

CPU = torch.device("cpu")
SETTINGS = TINY["dp-diffusion"]["settings"] | TINY["dp-diffusion"]["public"]
METHOD = ("--method", "dp-diffusion")


def tiny(*overrides: str) -> DpDiffusionSettings:
    return build_settings(DpDiffusionSettings, SETTINGS, overrides)


def weights(bundle: Bundle) -> dict[str, torch.Tensor]:
    return bundle.component("denoiser", Denoiser).state_dict()


def made(letters: Path, out: Path, *overrides: str) -> Bundle:
    return build_public_bundle([letters], out, tiny(*overrides), CPU, resume=False)


def trained(base: Bundle, private: Path, out: Path, *overrides: str) -> Bundle:
    chosen = build_settings(DpDiffusionSettings, base.config.settings, overrides)
    found = train_private_bundle(
        base.path, PrivateImages(private), out, chosen, epsilon=10.0, delta=None, device=CPU, resume=False,
        ledger=out.parent / "ledger.jsonl",
    )  # fmt: skip
    assert found is not None
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, letters: Path) -> Bundle:
    return made(letters, tmp_path_factory.mktemp("base") / "base")


def test_from_public_images_to_a_report_on_the_command_line(tmp_path: Path, letters: Path, digits: Path) -> None:
    settings = flags(SETTINGS)
    base, model, images, report = (tmp_path / name for name in ("base", "model", "images.npz", "report.json"))
    build = ["build-kb", *METHOD, "--public", letters, "--out", base, *settings]
    train = ["train-private", "--base", base, "--private", digits, "--epsilon", 8, "--out", model]
    for command in (
        build,
        ["plan", "--base", base, "--size", 100, "--epsilon", 8, "--batch", 20, "--steps", 3],
        train,
        ["generate", "--model", model, "--count", 40, "--out", images, "--seed", 3],
        ["evaluate", "--synthetic", images, "--real", digits, "--public", letters, "--model", model, "--epochs", 1,
         "--classifiers", "small", "--ensemble", 2, "--out", report],
    ):  # fmt: skip
        done = run(*command)
        assert done.returncode == 0, done.stderr
    assert "ensemble of 2 small CNN" in done.stdout
    privacy = json.loads((model / "privacy.json").read_text())
    assert privacy["method"] == "dp-diffusion"
    assert [release["name"] for release in privacy["releases"]] == ["overlap", "denoiser"]
    assert 7 < privacy["epsilon"] <= 8
    assert sorted(path.name for path in base.iterdir() if path.is_dir()) == ["checkpoints", "denoiser", "thumbnails"]
    assert sorted(path.name for path in model.iterdir() if path.is_dir()) == ["checkpoints", "denoiser"]
    assert "letters.npz" in (model / "README.md").read_text()
    told = run("info", model).stdout
    assert '"timesteps": 1000' in told
    assert '"public_classes": 13' in told
    found = np.load(images)
    assert found["images"].shape == (40, 32, 32)
    assert list(np.bincount(found["labels"])) == [4] * 10
    assert json.loads(report.read_text())["utility"]["synthetic"]["selected"]["members"] == 2


def test_the_public_stage_is_stopped_and_resumed(tmp_path: Path, letters: Path) -> None:
    """The resumed run takes the steps that an uninterrupted one would take."""
    steps = ["--set", "denoiser.training.steps=60"]
    command = ["build-kb", *METHOD, "--public", letters, *flags(SETTINGS), *steps]
    child = Program(*command, "--out", tmp_path / "stopped")
    shown = ""
    while "0/60" not in shown:
        more = child.stderr.read(1)
        assert more, shown
        shown += more
    child.send_signal(signal.SIGINT)
    child.communicate()
    assert child.returncode == 130
    assert not (tmp_path / "stopped" / "config.json").exists()
    state = torch.load(tmp_path / "stopped" / "checkpoints" / "denoiser.pt", weights_only=True)
    assert 0 <= state["step"] < 60
    for out, more in (("stopped", ["--resume"]), ("whole", [])):
        done = run(*command, "--out", tmp_path / out, *more)
        assert done.returncode == 0, done.stderr
    first, second = (weights(Bundle.open(tmp_path / out, "out", "public")) for out in ("stopped", "whole"))
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], rtol=1e-3, atol=1e-4)


def test_frozen_parameters_are_those_of_the_base(tmp_path: Path, base: Bundle, digits: Path) -> None:
    chosen = "private.trainable=['*attentions*', 'class_table.*']"
    model = trained(base, digits, tmp_path / "m", chosen)
    before, after = weights(base), weights(model)
    for name, tensor in after.items():
        if "attentions" in name:
            assert not torch.equal(tensor, before[name]), name
        elif name != "class_table.weight":
            assert torch.equal(tensor, before[name]), name
    assert after["class_table.weight"].shape[0] == 11
    count = sum(tensor.numel() for name, tensor in after.items() if "attentions" in name)
    count += after["class_table.weight"].numel()
    assert trained_parameters(model.settings_as(DpDiffusionSettings), 10) == count


@pytest.mark.parametrize(("name", "last"), [("constant", 0.5), ("cosine", 0.05)])
def test_learning_rates(name: str, last: float) -> None:
    own = tiny("private.steps=100", f"private.learning_rate_schedule={name}").private
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    schedule, rates = noisy_schedule(optimizer, own.steps, own.learning_rate_schedule), []
    for _ in range(100):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert max(rates) == 0.5
    assert rates[-1] == pytest.approx(last, rel=0.02)
    assert (min(rates) == 0.5) == (name == "constant")


def test_images_do_not_depend_on_the_batch(base: Bundle) -> None:
    generator = open_generator(base.path, "cpu")
    labels = [0, 1, 2, 3, 4]
    whole = generate(generator, 5, labels, seed=7)
    single = generator_of(base, CPU, ["generation.batch_size=1"])
    alone = generate(single, 5, labels, seed=7)
    assert_same_images(alone.images, whole.images)
    assert generator.classes == base.config.classes
    assert generator.calls() == 4
    assert generator.calls(10) == 10
    assert generator.label(whole.images) is None
    with pytest.raises(InputError, match="no knowledge base"):
        generator.record_images(np.array([0]))
    assert not np.array_equal(generate(generator, 5, labels[::-1], seed=7).images, whole.images)


def test_guidance(base: Bundle, letters: Path, tmp_path: Path) -> None:
    """Scale 0 is the null class whatever the label, 1 the label alone, and larger scales extrapolate."""
    denoiser = base.component("denoiser", Denoiser)
    usual = base.settings_as(DpDiffusionSettings).generation
    scales = [usual.model_copy(update={"guidance": scale}) for scale in (0.0, 1.0, 2.5)]
    generators = [PixelGenerator(base, CPU, settings) for settings in scales]
    x, t, labels = torch.randn(3, *generators[0].latent_shape), torch.tensor([100, 500, 900]), torch.tensor([0, 1, 2])
    with torch.no_grad():
        alone, null = denoiser(x, t, labels), denoiser(x, t, denoiser.null_labels(3))
        for generator, expected in zip(generators, (null, alone, null + 2.5 * (alone - null)), strict=True):
            clipped = generator._schedule.clipped_noise(x, expected, t, 1.0)
            torch.testing.assert_close(generator.predict("denoiser", x, t, labels), clipped, rtol=1e-3, atol=1e-4)
            if generator.settings.guidance == 0:
                torch.testing.assert_close(generator.predict("denoiser", x, t, None), clipped, rtol=1e-3, atol=1e-4)
    # dropout of a private stage that never ran trains no null class
    only_labelled = made(letters, tmp_path / "labelled", "denoiser.label_dropout=0", "private.label_dropout=0.1")
    with pytest.raises(InputError, match=r"generation\.guidance.*label_dropout"):
        generator_of(only_labelled, CPU, ["generation.guidance=2"])


def test_unlabelled_images_on_both_sides(tmp_path: Path, letters: Path, digits: Path) -> None:
    plain = tmp_path / "plain.npz"
    np.savez(plain, images=np.load(digits)["images"])
    unconditional = made(letters, tmp_path / "base", "denoiser.conditional=false")
    assert weights(unconditional)["class_table.weight"].shape[0] == 1
    assert open_generator(unconditional.path, "cpu").classes == ()
    model = trained(unconditional, plain, tmp_path / "m")
    generator = open_generator(model.path, "cpu")
    assert generator.classes == ()
    assert generate(generator, 3, seed=1).labels is None
    # dropout of a private stage that never ran trains no null class
    only_labelled = made(letters, tmp_path / "labelled", "denoiser.label_dropout=0", "private.label_dropout=0.1")
    with pytest.raises(InputError, match="trained with labels alone"):
        trained(only_labelled, plain, tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_from_scratch_the_public_images_train_nothing(tmp_path: Path, letters: Path, digits: Path) -> None:
    base = made(letters, tmp_path / "base", "denoiser.pretrained=false")
    assert base.config.public is not None
    assert (base.config.public.pre_training, base.config.public.reference) == (0, 60)
    assert "not trained" in (base.path / "README.md").read_text()
    model = trained(base, digits, tmp_path / "m", "private.overlap.share=0")
    assert "random weights" in (model.path / "README.md").read_text()
    assert model.privacy is not None
    assert "not checked whether private images" in model.privacy["notes"][0]


def test_copies_of_public_images_are_refused(tmp_path: Path, base: Bundle, letters: Path) -> None:
    done = run("train-private", "--base", base.path, "--private", letters, "--epsilon", 10, "--out", tmp_path / "m",
               "--set", "private.overlap.share=0.5")  # fmt: skip
    assert done.returncode == 3
    assert "overlap" in done.stderr


def test_membership_scores_are_finite_and_of_each_image(tmp_path: Path, base: Bundle, letters: Path) -> None:
    images = load_images(letters, "-")
    padded = ImageSet(np.pad(images.images, ((0, 0), (2, 2), (2, 2))), images.labels, images.classes, "-")
    (scores,) = membership_scores(base, padded, CPU).values()
    assert scores.shape == (60,)
    assert np.isfinite(scores).all()
    assert len(set(scores.round(9))) == 60


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["timesteps.breaks=[0, 30, 800, 900]"], "timesteps.breaks must end at 1000"),
        (["schedule.timesteps=500"], "timesteps.breaks must end at 500"),
        (["private.timesteps.breaks=[0, 30, 20, 1000]"], "must ascend"),
        (["private.timesteps.weights=[0.5, 0.6, 0.1]"], "add up to 1"),
        (["private.timesteps.weights=[1.0]"], "one entry more"),
        (
            ["image.size=36", "denoiser.multipliers=[1,1,1]", "denoiser.attention=[false,false,false]"],
            "divisible by 16",
        ),
        (["private.views.shift=32"], "must be less than image.size"),
        (["generation.attempts=2"], "must be at most 1"),
        (["generation.steps=1001"], "at most 1000"),
    ],
)
def test_settings_that_do_not_fit_are_refused(overrides: Sequence[str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        tiny(*overrides)


def test_a_batch_larger_than_the_set_is_refused() -> None:
    facts = PublicFacts(100, ("0", "1"), (32, 32))
    with pytest.raises(InputError, match="larger than the private set"):
        releases(tiny("private.expected_batch=101"), facts, None)
    with pytest.raises(InputError, match="more than the 100 images"):
        releases(tiny("private.noise_band=9"), facts, None)


def test_clipped_sampling_is_that_of_diffusers(base: Bundle) -> None:
    """DDIM with diffusers' own clipping, whose next step uses the noise that the clipped image implies, as here."""
    sampling = base.settings_as(DpDiffusionSettings).generation
    assert sampling.clip_range == 1
    generator = PixelGenerator(base, CPU, sampling.model_copy(update={"sampler": "ddim", "steps": 10}))
    start = torch.from_numpy(normal(make_streams(0, np.arange(6)), generator.latent_shape))
    labels = torch.arange(6) % len(base.classes)
    (phase,) = generator.route()
    assert isinstance(phase.sampler, Solver)
    found = phase.sampler.run(lambda x, t: generator.predict("denoiser", x, torch.full((6,), t), labels), start)
    betas = build_schedule(base.settings_as(DpDiffusionSettings).schedule).betas.numpy()
    scheduler = DDIMScheduler(len(betas), trained_betas=betas, clip_sample=True, set_alpha_to_one=True)
    scheduler.set_timesteps(10)
    denoiser, x = base.component("denoiser", Denoiser), start
    with torch.no_grad():
        for t in range(999, -1, -100):
            noise = denoiser(x, torch.full((6,), t + 1), labels)
            x = scheduler.step(noise, t, x, use_clipped_model_output=True).prev_sample
    torch.testing.assert_close(found, x, rtol=1e-3, atol=1e-3)
