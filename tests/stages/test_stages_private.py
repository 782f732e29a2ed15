"""The private stage as a whole: what is written, what is said, resuming."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rapid.bundle import Bundle, Component
from rapid.bundle.components import save_component
from rapid.data.private import PrivateImages
from rapid.data.units import ONE_IMAGE, ONE_PERSON, PeopleFrom
from rapid.dp.accounting import prv_epsilon
from rapid.dp.events import event_from_json
from rapid.dp.ledger import Ledger
from rapid.dp.spending import balances
from rapid.dp.statement import RETAKEN_NOTE
from rapid.errors import InputError, Stopped
from rapid.files import content_hash
from rapid.methods import apply_overrides
from rapid.methods.rapid.knowledge_base import open_knowledge_base
from rapid.methods.rapid.settings import RapidSettings
from rapid.nn import Denoiser
from rapid.stages.private import train_private_bundle
from rapid.stages.setup import check_pieces

CPU = torch.device("cpu")


def test_privacy_json_follows_from_the_plan(private_bundle: Path, tiny_settings: RapidSettings) -> None:
    statement = json.loads((private_bundle / "privacy.json").read_text())
    wanted = {
        "epsilon", "delta", "accountant", "adjacency", "unit", "noise_multiplier", "sample_rate", "steps", "clip_norm",
        "dataset_size", "noise_source", "created", "packages",
    }  # fmt: skip
    assert wanted <= statement.keys()
    assert statement["dataset_size"] == 100
    assert statement["sample_rate"] == tiny_settings.private.expected_batch / 100
    assert statement["unit"] == "one image"
    alone = next(one for one in statement["releases"] if one["name"] == "denoiser")
    assert {name: alone[name] for name in ("noise_multiplier", "sample_rate", "steps")} == {
        name: statement[name] for name in ("noise_multiplier", "sample_rate", "steps")
    }
    assert prv_epsilon([event_from_json(alone["event"])], statement["delta"]) < statement["epsilon"]
    spent = prv_epsilon([event_from_json(statement["event"])], statement["delta"])
    assert spent <= statement["epsilon"] <= 10
    assert "opacus" in statement["accountant"]
    assert "differentially private" in (private_bundle / "README.md").read_text()


def test_draws_and_groups_are_options(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings
) -> None:
    chosen = apply_overrides(
        tiny_settings.model_dump(mode="json"),
        [
            "private.multiplicity=3", "private.group_size=4", "private.physical_batch=2",
        ],
    )  # fmt: skip
    out = tmp_path / "out"
    train_private_bundle(
        public_bundle, PrivateImages(digits), out, chosen, epsilon=10.0, delta=None, device=CPU, resume=False
    )  # fmt: skip
    statement = json.loads((out / "privacy.json").read_text())
    assert statement["multiplicity"] == 3
    assert statement["group"]["size"] == 4
    assert statement["group"]["epsilon"] > statement["epsilon"]
    assert "a person with 4 images" in (out / "README.md").read_text()
    weights = Bundle.open(out, "out").component("denoiser", Denoiser).state_dict()
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert all(value.dtype == torch.float32 for value in weights.values())


def test_what_is_written_and_said_depends_on_the_images_only_through_the_weights(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings, capfd: pytest.CaptureFixture[str]
) -> None:
    with np.load(digits) as archive:
        arrays = dict(archive)
    written, said = [], []
    for name, images, labels in (
        ("real", arrays["images"], arrays["labels"]),
        ("other", 255 - arrays["images"][::-1], np.full(100, 7)),
    ):
        source = tmp_path / name / "data.npz"
        source.parent.mkdir()
        np.savez(source, images=images, labels=labels, classes=arrays["classes"])
        out = tmp_path / name / "bundle"
        train_private_bundle(
            public_bundle, PrivateImages(source), out, tiny_settings, epsilon=5.0, delta=None, device=CPU, resume=False
        )
        written.append(out)
        # but for the clock in the progress, what is shown is the same
        said.append([part.split("|")[0] for part in capfd.readouterr().err.splitlines()])
    first, second = written
    names = sorted(p.relative_to(first).as_posix() for p in first.rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(second).as_posix() for p in second.rglob("*") if p.is_file())
    different = {name for name in names if content_hash(first / name) != content_hash(second / name)}
    # config.json holds the hash of the weights, privacy.json and the card the time, run.json a random name
    assert different <= {
        "denoiser/diffusion_pytorch_model.safetensors", "probe/diffusion_pytorch_model.safetensors",
        "config.json", "privacy.json", "README.md", "checkpoints/run.json",
    }  # fmt: skip
    configs = [json.loads((out / "config.json").read_text()) for out in written]
    for config in configs:
        config["components"].pop("denoiser")
        config["components"].pop("probe")
    assert configs[0] == configs[1]
    assert said[0][-1].split(":")[0] == said[1][-1].split(":")[0]


def test_a_run_is_resumed_with_the_noise_that_it_began_with(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings
) -> None:
    """Solved again, with other threads or another CPU, the noise may differ in the last digit."""

    def train(epsilon: float, *, resume: bool) -> Bundle | None:
        return train_private_bundle(
            public_bundle, PrivateImages(digits), tmp_path / "out", tiny_settings, epsilon=epsilon, delta=None,
            device=CPU, resume=resume,
        )  # fmt: skip

    train(5.0, resume=False)
    file = tmp_path / "out" / "checkpoints" / "manifest.json"
    manifest = json.loads(file.read_text())
    for release in manifest["budget"]["releases"]:
        release["noise_multiplier"] *= 1 + 1e-9
    file.write_text(json.dumps(manifest))
    assert train(5.0, resume=True) is not None
    with pytest.raises(InputError, match="epsilon"):
        train(5.1, resume=True)


@pytest.mark.parametrize("people", [None, PeopleFrom("person")])
def test_a_stopped_run_does_not_go_on_with_other_labels(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings, people: PeopleFrom | None
) -> None:
    """Half of the model would be of the old labels."""
    with np.load(digits) as archive:
        arrays = dict(archive) | {"person": np.arange(100) // 2}
    out, book = tmp_path / "out", tmp_path / "ledger.jsonl"

    def go(labels: NDArray[np.int64], *, resume: bool) -> None:
        np.savez(tmp_path / "private.npz", **arrays | {"labels": labels})
        train_private_bundle(
            public_bundle, PrivateImages(tmp_path / "private.npz", people=people), out, tiny_settings,
            epsilon=10.0, delta=1e-3, device=CPU, resume=resume, ledger=book,
        )  # fmt: skip

    def stop(*_: object, **__: object) -> None:
        raise Stopped("stopped")

    with pytest.raises(Stopped), pytest.MonkeyPatch.context() as patch:
        patch.setattr("rapid.bundle.format.save_component", stop)
        go((arrays["labels"] + 1) % 10, resume=False)
    lines = len(Ledger(book).entries())
    with pytest.raises(InputError, match="has other labels than when the run in --out began") as refused:
        go(arrays["labels"], resume=True)
    assert refused.value.exit_code == 2
    assert len(Ledger(book).entries()) == lines
    go((arrays["labels"] + 1) % 10, resume=True)
    assert (out / "config.json").exists()


@pytest.mark.parametrize("delta", [None, 1e-4])
def test_a_private_set_with_an_image_less_is_told(
    tmp_path: Path, private_bundle: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings,
    delta: float | None,
) -> None:  # fmt: skip
    """Not the delta or the budget, which follow from the number of images."""
    with np.load(digits) as archive:
        fewer = {name: archive[name][:99] for name in ("images", "labels")} | {"classes": archive["classes"]}
    np.savez(tmp_path / "fewer.npz", **fewer)
    shutil.copytree(private_bundle, tmp_path / "out")
    with pytest.raises(InputError) as refused:
        train_private_bundle(
            public_bundle, PrivateImages(tmp_path / "fewer.npz"), tmp_path / "out", tiny_settings, epsilon=10.0,
            delta=delta, device=CPU, resume=True, ledger=tmp_path / "ledger.jsonl",
        )  # fmt: skip
    assert refused.value.field == "private"
    assert "has 99 images, and the run in --out had 100; give the same images" in refused.value.problem


def test_a_bundle_has_nothing_of_an_earlier_attempt(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings
) -> None:
    """After a full disk, and with a release whose record is gone: it is made and charged anew, and so it is told."""
    out, book = tmp_path / "out", tmp_path / "ledger.jsonl"

    def go(*, resume: bool) -> None:
        train_private_bundle(
            public_bundle, PrivateImages(digits), out, tiny_settings,
            epsilon=10.0, delta=None, device=CPU, resume=resume, ledger=book,
        )  # fmt: skip

    save = save_component

    def full(component: Component, folder: Path) -> None:
        if folder.name == "denoiser":
            raise OSError(errno.ENOSPC, "No space left on device")
        save(component, folder)

    with pytest.raises(OSError, match="No space"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("rapid.bundle.format.save_component", full)
        go(resume=False)
    earlier = content_hash(out / "probe")
    (out / "checkpoints" / "probe.pt").unlink()
    go(resume=True)
    assert content_hash(out / "probe") != earlier
    statement = json.loads((out / "privacy.json").read_text())
    (spent,) = balances(Ledger(book).entries())
    assert statement["epsilon"] == pytest.approx(spent.epsilon, rel=1e-4)
    assert statement["epsilon"] > 10
    assert RETAKEN_NOTE in statement["notes"]
    assert RETAKEN_NOTE in (out / "README.md").read_text()


def test_unlabelled_images_give_an_unconditional_model(
    tmp_path: Path, public_bundle: Path, digits: Path, tiny_settings: RapidSettings
) -> None:
    with np.load(digits) as archive:
        np.savez(tmp_path / "plain.npz", images=archive["images"])
    bundle = train_private_bundle(
        public_bundle, PrivateImages(tmp_path / "plain.npz"), tmp_path / "out", tiny_settings, epsilon=5.0, delta=None,
        device=CPU, resume=False,
    )  # fmt: skip
    assert bundle.config.classes == ()
    assert bundle.component("denoiser", Denoiser).num_classes == 0


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_memory_of_people_does_not_decide_the_pieces(tiny_settings: RapidSettings, precision: str) -> None:
    tree = tiny_settings.model_dump(mode="json")
    measured = apply_overrides(tree, [f"private.precision={precision}", "private.physical_batch=auto"])
    with pytest.raises(InputError, match=r"private\.physical_batch auto: depends on the memory .*; give a number"):
        check_pieces(measured, ONE_PERSON)
    check_pieces(measured, ONE_IMAGE)
    check_pieces(apply_overrides(tree, [f"private.precision={precision}"]), ONE_PERSON)


def test_a_private_bundle_is_complete_in_itself(private: Bundle) -> None:
    assert private.config.kind == "private"
    assert len(open_knowledge_base(private)) == 18
    assert private.component("denoiser", Denoiser).num_classes == 10
    assert private.component("public_denoiser", Denoiser).num_classes == 13
