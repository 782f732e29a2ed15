"""Settings of a public stage are fixed by its bundle, whether or not the method says so."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from methods import mistaken
from tests_children import train_privately

from rapid.bundle import Bundle
from rapid.config.presets import private_settings
from rapid.errors import InputError
from rapid.methods import apply_overrides, find_method
from rapid.stages.public import build_public_bundle

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path_factory.mktemp("site")
    mistaken.install(site, "undeclared", "undeclared = methods.undeclared:METHOD")
    monkeypatch.syspath_prepend(site)


def build(letters: Path, out: Path, *overrides: str, resume: bool = False) -> Bundle:
    settings = apply_overrides({"method": "undeclared", "features": {"count": 3}}, overrides)
    return build_public_bundle([letters], out, settings, CPU, resume=resume)


def test_a_private_run_has_the_settings_that_its_base_was_made_with(
    tmp_path: Path, letters: Path, digits: Path
) -> None:
    base = build(letters, tmp_path / "kb")
    settings = base.settings_as(find_method("undeclared").settings)
    for override in ("features.count=50", "features={count: 50}", "image.size=64"):
        section = override.partition(".")[0].partition("=")[0]
        with pytest.raises(InputError, match=rf"the public bundle \(--base\) fixes '{section}'; set it in build-kb"):
            private_settings(settings, None, [override])
    chosen = private_settings(settings, None, ["private.bound=4", "generation.deviation=0"])
    made = train_privately(base.path, digits, tmp_path / "out", chosen, tmp_path / "ledger.jsonl")
    assert made.config.settings["features"] == {"count": 3}
    assert made.config.settings["private"]["bound"] == 4


def test_a_build_does_not_go_on_with_other_settings(tmp_path: Path, letters: Path) -> None:
    build(letters, tmp_path / "kb")
    with pytest.raises(InputError, match=r"holds a run with another 'settings\.features\.count'"):
        build(letters, tmp_path / "kb", "features.count=4", resume=True)
    # as before: what is for the private stage and for sampling is not fixed
    build(letters, tmp_path / "kb", "private.bound=4", "generation.deviation=0", resume=True)
