"""Images of a private model as public ones: its guarantee goes with all that is built on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from methods.tiny import TINY, flags

from rapid.bundle import Bundle
from rapid.cli import main
from rapid.data.origin import Origin

OWN = TINY["dp-diffusion"]
SETTINGS = flags(OWN["settings"] | OWN["public"])

pytestmark = pytest.mark.filterwarnings("ignore:at this epsilon")


def rapid(*arguments: object) -> None:
    assert main([str(one) for one in arguments]) == 0


@pytest.fixture(scope="module")
def synthetic(private_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 images of the private bundle."""
    out = tmp_path_factory.mktemp("synthetic") / "syn.npz"
    more = ("--set", "generation.attempts=1")
    rapid("generate", "--model", private_bundle, "--count", 30, "--labels", "all", "--out", out, *more)
    return out


def built(out: Path, *sets: Path, networks: Path | None = None) -> Bundle:
    public = [word for one in sets for word in ("--public", one)]
    more = () if networks is None else ("--networks", networks)
    rapid("build-kb", "--method", "dp-diffusion", *public, "--out", out, *SETTINGS, *more)
    return Bundle.open(out, "base", "public")


@pytest.fixture(scope="module")
def base(synthetic: Path, letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Of letters and of these images."""
    return built(tmp_path_factory.mktemp("base") / "base", letters, synthetic)


@pytest.fixture(scope="module")
def model(base: Bundle, digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A private bundle on that base."""
    out = tmp_path_factory.mktemp("model") / "model"
    rapid("train-private", "--base", base.path, "--private", digits, "--epsilon", 3, "--delta", 1e-3, "--out", out)
    return Bundle.open(out, "model", "private")


def origin_of(bundle: Bundle) -> dict[str, Any]:
    """As its own files tell it."""
    told = json.loads((bundle.path / "privacy.json").read_text())
    own = {"model": bundle.path.name, "sha256": bundle.digest}
    return own | {name: told[name] for name in ("method", "epsilon", "delta", "adjacency")}


def test_build_kb_says_so_and_records_it(
    private: Bundle, base: Bundle, synthetic: Path, letters: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built(tmp_path / "again", letters, synthetic)
    lines = [line for line in capsys.readouterr().err.splitlines() if "synthetic images" in line]
    assert len(lines) == 1
    assert lines[0].startswith(f"rapid: {synthetic}: synthetic images of the private model 'private' (rapid, epsilon 1")
    assert "add or remove one image" in lines[0]
    config = json.loads((base.path / "config.json").read_text())
    assert config["public"]["origins"] == [origin_of(private)]
    card = (base.path / "README.md").read_text()
    assert "from public and synthetic images: letters.npz, syn.npz" in card
    assert "made by the private model 'private' (rapid, epsilon 1" in card
    assert "It holds no private information" not in card


def test_a_private_bundle_on_it_has_a_note(private: Bundle, base: Bundle, model: Bundle) -> None:
    told = json.loads((model.path / "privacy.json").read_text())
    # its own epsilon is that of its own training
    assert 2.9 < told["epsilon"] <= 3
    (note,) = [note for note in told["notes"] if "synthetic images" in note]
    assert note.startswith(
        f"The base was made from synthetic images of the private model {Origin(**origin_of(private))}."
    )
    assert "images that trained both models have the sum of the epsilons and of the deltas (basic composition)" in note
    assert note in (model.path / "README.md").read_text()


def test_what_it_generates_names_both(
    private: Bundle, base: Bundle, model: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the private model, and of the public base itself."""
    for bundle, own in ((model, origin_of(model)), (base, {"model": base.path.name, "sha256": base.digest})):
        out = tmp_path / f"{bundle.path.name}.npz"
        rapid("generate", "--model", bundle.path, "--count", 3, "--out", out)
        with np.load(out) as found:
            assert json.loads(found["rapid"].item()) == own | {"synthetic": True, "made_from": [origin_of(private)]}
    again = built(tmp_path / "next", tmp_path / "model.npz")
    assert [one.model_dump() for one in again.origins] == [origin_of(model), origin_of(private)]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "synthetic images" in line]
    assert "of the private models 'model' (dp-diffusion, epsilon 3" in line
    card = (again.path / "README.md").read_text()
    assert "whose epsilons and deltas add up for images that trained several of them" in card


def test_networks_keep_it_for_images_that_do_not_say_so_any_more(
    base: Bundle, synthetic: Path, letters: Path, tmp_path: Path
) -> None:
    stripped = tmp_path / "syn.npz"
    with np.load(synthetic) as found:
        np.savez(stripped, **{name: found[name] for name in ("images", "labels", "classes")})
    assert built(tmp_path / "plain", letters, stripped).origins == ()
    reused = built(tmp_path / "reused", letters, stripped, networks=base.path)
    assert reused.origins == base.origins
    assert reused.config.components == base.config.components


def test_bundles_of_earlier_versions_are_read(base: Bundle, public_bundle: Path, tmp_path: Path) -> None:
    old = tmp_path / "old"
    base.copy_to(old)
    config = json.loads((old / "config.json").read_text())
    del config["public"]["origins"]
    (old / "config.json").write_text(json.dumps(config))
    assert Bundle.open(old, "base", "public").origins == ()
    # nothing changes where all images are public
    card = (public_bundle / "README.md").read_text()
    assert "from public images only: letters.npz" in card
    assert "It holds no private information." in card
