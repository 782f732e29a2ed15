"""`--preset auto` and `--minutes` as a user meets them: the three commands without settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests_process import Program, run, wait_for

RESUMED = "the settings of the earlier run stay, for the time that it was given; another --minutes changes nothing\n"

SHORT = ("--minutes", 0.02, "--set", "private.expected_batch=16")
"""A batch that is given is not refused for so little time."""


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small colour images of two classes."""
    folder = tmp_path_factory.mktemp("colours")
    rng = np.random.default_rng(0)
    labels = np.arange(160) % 2
    coarse = rng.uniform(0, 150, (160, 4, 4, 3)) + 100 * labels[:, None, None, None]
    images = coarse.repeat(4, 1).repeat(4, 2).clip(0, 255).astype(np.uint8)
    np.savez(folder / "public.npz", images=images, labels=labels, classes=["dark", "light"])
    np.savez(folder / "private.npz", images=images[::-1, :, ::-1], labels=labels[::-1], classes=["x", "y"])
    return folder


@pytest.mark.filterwarnings("ignore:at this epsilon")
def test_the_three_commands_need_no_settings(tmp_path: Path, colours: Path) -> None:
    base, model = tmp_path / "base", tmp_path / "model"
    build = ("build-kb", "--public", colours / "public.npz", "--out", base, "--minutes", 0.02)
    built = run(*build)
    assert built.returncode == 0, built.stderr
    for word in ("images: 16x16, colour", "latents: ", "augmentation: ", "networks: ", "autoencoder: ", "retrieval: "):
        assert word in built.stdout
    config = json.loads((base / "config.json").read_text())
    assert config["settings"]["preset"] == "auto"
    # the measured times differ, the recorded settings do not
    again = run(*build, "--resume")
    assert again.returncode == 0, again.stderr
    assert "networks: " not in again.stdout
    assert again.stdout.startswith(RESUMED)
    assert json.loads((base / "config.json").read_text()) == config

    train = ("train-private", "--base", base, "--private", colours / "private.npz", "--epsilon", 5, "--delta", 1e-3)
    for epsilon in (-1, "nan"):
        refused = run(*train, "--out", tmp_path / "refused", "--epsilon", epsilon)
        assert refused.returncode == 2
        told = f"rapid: --epsilon {float(epsilon)}: must be a positive number"
        assert refused.stderr.splitlines()[-1].startswith(told)
        assert "N = 160" not in refused.stdout
    # epsilon is not spent for a batch of one image
    short = run(*train, "--out", tmp_path / "refused", "--ledger", tmp_path / "ledger.jsonl", "--minutes", 0.001)
    assert short.returncode == 2
    told = "rapid: --minutes 0.001: leave time for less than 1 gradient a step, too few for the noise, so that epsilon "
    assert short.stderr.splitlines()[-1].startswith(told)
    assert "N = 160" not in short.stdout
    assert not (tmp_path / "refused").exists()
    assert "  run " not in run("ledger", "show", "--ledger", tmp_path / "ledger.jsonl").stdout
    train = (*train, "--out", model, "--ledger", tmp_path / "ledger.jsonl", *SHORT)
    trained = run(*train)
    assert trained.returncode == 0, trained.stderr
    assert "40 steps by N = 160 and epsilon 5" in trained.stdout
    one = ("--epsilon", 5, "--batch", 16, "--steps", 5)
    planned = run("plan", "--base", base, "--private", colours / "private.npz", *one)
    assert "train-private chooses batch and steps of its own by --minutes" in planned.stdout
    once_more = run(*train, "--resume")
    assert once_more.returncode == 0, once_more.stderr
    assert once_more.stdout.startswith(RESUMED)
    assert json.loads((model / "privacy.json").read_text())["steps"] == 40
    made = run("generate", "--model", model, "--count", 4, "--out", tmp_path / "images.npz")
    assert made.returncode == 0, made.stderr
    with np.load(tmp_path / "images.npz") as archive:
        assert archive["images"].shape == (4, 16, 16, 3)


def test_a_killed_run_goes_on_with_what_was_chosen(tmp_path: Path, colours: Path) -> None:
    """Also with what is only a default of later stages; no time is measured again."""
    base = tmp_path / "base"
    manifest = base / "checkpoints" / "manifest.json"
    build = ("build-kb", "--public", colours / "public.npz", "--out", base, "--minutes")
    begun = Program(*build, 0.3)
    wait_for(manifest)
    begun.kill()
    begun.communicate()
    assert not (base / "config.json").exists()
    written = json.loads(manifest.read_text())
    resumed = run(*build, 0.01, "--resume", "--set", "generation.steps=7")
    assert resumed.returncode == 0, resumed.stderr
    assert "networks: " not in resumed.stdout
    assert resumed.stdout.count(RESUMED) == 1
    chosen = written["settings"] | written["remembered"]
    chosen["generation"]["steps"] = 7
    assert json.loads((base / "config.json").read_text())["settings"] == chosen


def save_photographs(folder: Path, count: int, longest: int) -> Path:
    """Photographs of two classes and of all sizes, some of them grey."""
    rng = np.random.default_rng(longest)
    for number in range(count):
        coarse = rng.uniform(0, 150, (4, 4, 3)) + 100 * (number % 2)
        width, height = (int(side) for side in rng.integers(20, longest, 2))
        image = Image.fromarray(coarse.clip(0, 255).astype(np.uint8)).resize((width, height))
        path = folder / ("dark", "light")[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        (image.convert("L") if number % 9 == 0 else image).save(path)
    return folder


@pytest.mark.filterwarnings("ignore:at this epsilon")
def test_photographs_of_all_sizes_need_no_settings(tmp_path: Path) -> None:
    """Private ones are larger than public ones, and nothing is told of their sizes."""
    public = save_photographs(tmp_path / "public", 120, 90)
    private, real = (save_photographs(tmp_path / name, 40, side) for name, side in (("private", 300), ("real", 310)))
    base, model, ledger = tmp_path / "base", tmp_path / "model", tmp_path / "ledger.jsonl"
    built = run("build-kb", "--public", public, "--out", base, "--minutes", 0.02)
    assert built.returncode == 0, built.stderr
    assert "images: 64x64, colour, scaled down from 2" in built.stdout
    told = [line for line in built.stderr.splitlines() if line.startswith(f"rapid: {public}: 8-bit RGB of ")]
    assert [line.split("; ")[1] for line in told] == ["scaled down to fit into 64x64"]
    image = json.loads((base / "config.json").read_text())["image"]
    assert image == {"size": 64, "channels": 3, "fit": "contain"}
    train = ("train-private", "--base", base, "--private", private, "--epsilon", 5, "--delta", 1e-3)
    # half a minute on an idle machine, more beside other programs
    trained = run(*train, "--out", model, "--ledger", ledger, *SHORT, timeout=400)
    assert trained.returncode == 0, trained.stderr
    assert "\nprivate images are fitted into 64x64: larger ones are scaled down" in f"\n{trained.stderr}"
    assert "8-bit" not in trained.stderr
    # the account is that of the images as they are stored
    shown = run("ledger", "show", private, "--ledger", ledger)
    assert "  run " in shown.stdout
    made = run("generate", "--model", model, "--count", 12, "--labels", "all", "--out", tmp_path / "made.npz")
    assert made.returncode == 0, made.stderr
    evaluate = ("evaluate", "--synthetic", tmp_path / "made.npz", "--real", real, "--model", model)
    evaluated = run(*evaluate, "--out", tmp_path / "r.json", "--classifiers", "small", "--epochs", 1)
    assert evaluated.returncode == 0, evaluated.stderr
    assert f"rapid: {real}: 8-bit RGB of " in evaluated.stderr
    assert json.loads((tmp_path / "r.json").read_text())["image"] == {"size": 64, "channels": 3}


def test_a_single_image_is_not_enough(tmp_path: Path) -> None:
    one = save_photographs(tmp_path / "one", 1, 40)
    built = run("build-kb", "--public", one, "--out", tmp_path / "out")
    planned = run("plan", "--private", one, "--preset", "demo", "--set", "image.fit=contain")
    for done, field in ((built, "public"), (planned, "private")):
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1].startswith(f"rapid: --{field} {one}: has a single image")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--minutes", "0"), "--minutes 0.0: must be a positive number"),
        (("--minutes", "nan"), "--minutes nan: must be a positive number"),
        (("--minutes", "3", "--preset", "demo"), "--minutes: is for settings that choose themselves"),
        (("--set", "autoencoder.latent_channels=99"), "the numbers of a patch"),
    ],
)
def test_bad_requests_are_refused_in_one_line(
    tmp_path: Path, colours: Path, arguments: tuple[str, ...], told: str
) -> None:
    found = run("build-kb", "--public", colours / "public.npz", "--out", tmp_path / "out", *arguments)
    assert found.returncode == 2
    assert told in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists()
