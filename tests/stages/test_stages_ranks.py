"""`build-kb` and `generate` by two processes: what one process makes, whatever stops them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from methods.tiny import TINY as METHODS
from safetensors.torch import load_file
from tests_process import Program
from tests_ranks import ends_of, torchrun, two_ranks
from tests_support import TINY

from rapid.bundle import Bundle
from rapid.methods import apply_overrides
from rapid.methods.rapid.knowledge_base import open_knowledge_base
from rapid.methods.rapid.settings import RapidSettings
from rapid.stages.public import build_public_bundle

CPU = torch.device("cpu")


def settings(*overrides: str) -> list[str]:
    return [word for override in overrides for word in ("--set", override)]


def flattened(tree: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        found += flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}={value}"]
    return found


def assert_same_weights(first: Path, second: Path) -> None:
    """Equal up to the rounding of sums, of which Adam makes whole steps where a gradient is next to zero.

    Not the subspace: rounding turns directions of nearly equal variance.
    """
    files = sorted(path.relative_to(first) for path in first.rglob("*.safetensors"))
    assert files
    assert files == sorted(path.relative_to(second) for path in second.rglob("*.safetensors"))
    for file in (one for one in files if one.parts[0] != "subspace"):
        one, other = load_file(first / file), load_file(second / file)
        gaps = torch.cat([(one[name].double() - other[name].double()).abs().flatten() for name in one])
        assert (gaps > 1e-5).double().mean() < 0.02, file


def test_build_kb_by_torchrun(tmp_path: Path, letters: Path, public_bundle: Path) -> None:
    out = tmp_path / "out"
    process = torchrun(
        "-m", "rapid", "build-kb", "--public", letters, "--preset", "demo", *settings(*TINY), "--out", out
    )  # fmt: skip
    output, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert output.count("public bundle:") == 1
    alone, shared = Bundle.open(public_bundle, "model"), Bundle.open(out, "model")
    assert_same_weights(public_bundle, out)
    assert shared.config.recipes == alone.config.recipes
    first, second = open_knowledge_base(alone), open_knowledge_base(shared)
    rows = np.arange(len(first))
    assert len(second) == len(first)
    np.testing.assert_array_equal(second.labels, first.labels)
    np.testing.assert_allclose(second.values(rows), first.values(rows), rtol=0, atol=0.05)
    with np.load(public_bundle / "split.npz") as one, np.load(out / "split.npz") as other:
        np.testing.assert_array_equal(one["reference"], other["reference"])


@pytest.mark.parametrize("method", ["dp-diffusion", "dp-classifier", "dpdm"])
def test_public_stages_of_other_methods(tmp_path: Path, letters: Path, method: str) -> None:
    tiny = {**METHODS[method]["settings"], **(METHODS[method]["public"] or {})}
    chosen = apply_overrides(tiny | {"method": method}, [])
    alone = build_public_bundle([letters], tmp_path / "alone", chosen, CPU, resume=False)
    sets = settings(*flattened(tiny))
    ends = ends_of(two_ranks("build-kb", "--public", letters, "--method", method, *sets, "--out", tmp_path / "shared"))
    assert [end.returncode for end in ends] == [0, 0], ends
    # the second one says nothing, not even its progress
    assert (ends[1].stdout, ends[1].stderr) == ("", "")
    assert_same_weights(alone.path, tmp_path / "shared")


def test_a_stop_is_everybodys_and_one_process_goes_on(
    tmp_path: Path, letters: Path, tiny_settings: RapidSettings
) -> None:
    out, more = tmp_path / "out", "denoiser.training.steps=150"
    programs = two_ranks(
        "build-kb", "--public", letters, "--preset", "demo", *settings(*TINY, more), "--out", out
    )  # fmt: skip
    shown = ""
    while "denoiser  " not in shown:
        character = programs[0].stderr.read(1)
        assert character, shown
        shown += character
    for program in programs:
        program.send_signal(signal.SIGINT)
    ends = ends_of(programs)
    assert [end.returncode for end in ends] == [130, 130], ends
    assert all("stopped; rerun the command with --resume" in end.stderr for end in ends)
    assert not (out / "config.json").exists()
    assert 0 < torch.load(out / "checkpoints" / "denoiser.pt", weights_only=True)["step"] < 150
    again = apply_overrides(tiny_settings.model_dump(mode="json"), [more])
    assert build_public_bundle([letters], out, again, CPU, resume=True).config.kind == "public"


def test_generate_makes_the_images_of_one_process(tmp_path: Path, private_bundle: Path) -> None:
    model = ["generate", "--model", private_bundle, "--count", "60", "--seed", "7"]
    few = settings("generation.batch_size=8", "generation.steps=10")
    ends = ends_of(two_ranks(*model, *few, "--out", tmp_path / "two.npz"))
    assert [end.returncode for end in ends] == [0, 0], ends
    assert (ends[1].stdout, ends[1].stderr) == ("", "")
    alone = Program(*model, *few, "--out", tmp_path / "one.npz")
    alone.communicate()
    assert alone.wait() == 0
    with np.load(tmp_path / "one.npz") as one, np.load(tmp_path / "two.npz") as two:
        np.testing.assert_array_equal(two["images"], one["images"])
        np.testing.assert_array_equal(two["labels"], one["labels"])


def test_bad_input_is_said_once(tmp_path: Path, private_bundle: Path) -> None:
    out = tmp_path / "out"
    for command, words in (
        (["build-kb", "--public", tmp_path / "none", "--preset", "demo", "--out", out], "does not exist"),
        (["generate", "--model", private_bundle, "--count", "0", "--out", out], "must be at least 1"),
    ):
        ends = ends_of(two_ranks(*command))
        assert [end.returncode for end in ends] == [2, 2]
        assert sum(end.stderr.count(words) for end in ends) == 1
        assert not out.exists()
