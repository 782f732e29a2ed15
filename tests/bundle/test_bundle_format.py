"""The format of bundles: components and their hashes, `model_index.json`, and what is refused."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rapid_index import KnowledgeBase

import rapid
from rapid.bundle import Bundle, BundleConfig, is_finished, write_bundle
from rapid.bundle.components import StoredComponent, Thumbnails, component_hash
from rapid.bundle.info import describe, provenance
from rapid.cli import main
from rapid.config.sections import ImageSettings
from rapid.errors import InputError
from rapid.methods.rapid.knowledge_base import open_knowledge_base
from rapid.methods.rapid.settings import RapidSettings
from rapid.methods.rapid.subspace import Subspace
from rapid.nn import Autoencoder, Denoiser, TrajectoryEncoder
from rapid.probe.network import Probe

PUBLIC = {
    "autoencoder": Autoencoder, "denoiser": Denoiser, "encoder": TrajectoryEncoder, "probe": Probe,
    "knowledge_base": KnowledgeBase, "subspace": Subspace, "thumbnails": Thumbnails,
}  # fmt: skip
PRIVATE = {name: kind for name, kind in PUBLIC.items() if name not in ("subspace", "thumbnails")}
PRIVATE |= {"public_denoiser": Denoiser}


def rows(seed: int) -> Thumbnails:
    return Thumbnails(np.random.default_rng(seed).integers(0, 256, (3, 256), np.uint8))


def config(**changes: Any) -> BundleConfig:
    common: dict[str, Any] = {
        "kind": "private",
        "method": "rapid",
        "settings": {"method": "rapid"},
        "image": ImageSettings(size=28),
        "classes": ("a", "b"),
        "public": None,
    }
    return BundleConfig(**(common | changes))


def written(folder: Path) -> Bundle:
    """A bundle of two small components and a statement."""
    parts = {"one": rows(1), "two": rows(2)}
    return write_bundle(folder, config(), parts, card="# Card\n", privacy={"epsilon": 1.0})


@pytest.mark.parametrize(("name", "expected"), [("public_bundle", PUBLIC), ("private_bundle", PRIVATE)])
def test_every_component_of_the_index_can_be_loaded_by_the_class_that_it_names(
    name: str, expected: dict[str, type], request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    index = json.loads((path / "model_index.json").read_text())
    assert (index.pop("_class_name"), index.pop("_rapid_version")) == ("RapidPipeline", rapid.__version__)
    assert index.keys() == expected.keys() == json.loads((path / "config.json").read_text())["components"].keys()
    for component, (module, qualified) in index.items():
        kind = getattr(importlib.import_module(module), qualified)
        assert kind is expected[component]
        load = kind.open if kind is KnowledgeBase else kind.load
        assert isinstance(load(path / component), kind)


def test_a_bundle_says_what_it_holds(private: Bundle, public_bundle: Path) -> None:
    assert private.classes == tuple("0123456789")
    assert private.image_shape == (32, 32)
    assert private.name == private.path.name
    assert private.config.method == "rapid"
    assert private.settings_as(RapidSettings).image.size == 32
    assert private.config.public == Bundle.open(public_bundle, "base").config.public
    for name, digest in private.config.components.items():
        assert component_hash(private.path / name) == digest
    # what comes from the public bundle is what it was there
    base = Bundle.open(public_bundle, "base").config.components
    assert {name: private.config.components[name] for name in ("autoencoder", "encoder", "knowledge_base")} == {
        name: base[name] for name in ("autoencoder", "encoder", "knowledge_base")
    }
    assert private.config.components["public_denoiser"] == base["denoiser"]


def test_a_private_bundle_is_complete_in_itself(private_bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(private_bundle, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints"))
    copy = Bundle.open(tmp_path / "copy", "model", "private")
    original = Bundle.open(private_bundle, "model")
    assert copy.digest == original.digest
    weights = [one.component("denoiser", Denoiser).state_dict() for one in (copy, original)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_what_is_written_is_what_is_opened(tmp_path: Path) -> None:
    bundle = written(tmp_path / "out")
    again = Bundle.open(tmp_path / "out", "model", "private")
    assert again.config == bundle.config
    assert again.privacy == {"epsilon": 1.0}
    assert (tmp_path / "out" / "README.md").read_text() == "# Card\n"
    np.testing.assert_array_equal(again.component("two", Thumbnails).rows, rows(2).rows)
    assert again.stored("one") == StoredComponent(tmp_path / "out" / "one", (Thumbnails.__module__, "Thumbnails"))
    assert not again.has("three")
    with pytest.raises(InputError, match="has no component three/"):
        again.component("three", Thumbnails)


def test_a_component_that_lies_there_is_written_again_if_it_is_private(tmp_path: Path) -> None:
    """A public run that was killed while it wrote the bundle goes on; what is private may be of another attempt."""
    for name, privacy, seed in (("public", None, 7), ("private", {"epsilon": 1.0}, 1)):
        rows(7).save(tmp_path / name / "one")
        kind = config().model_copy(update={"kind": name})
        bundle = write_bundle(tmp_path / name, kind, {"one": rows(1)}, card="", privacy=privacy)
        np.testing.assert_array_equal(bundle.component("one", Thumbnails).rows, rows(seed).rows)


def test_a_component_is_taken_over_whole(tmp_path: Path) -> None:
    """With its class, by links: bundles are never changed in place."""
    first = written(tmp_path / "first")
    parts = {"moved": first.stored("one")}
    second = write_bundle(tmp_path / "second", config(), parts, card="", privacy={})
    assert second.config.components["moved"] == first.config.components["one"]
    files = [folder / "thumbnails.npy" for folder in (tmp_path / "first" / "one", tmp_path / "second" / "moved")]
    assert files[0].samefile(files[1])
    assert second.stored("moved").kind == first.stored("one").kind


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def add_file(path: Path) -> None:
    (path.parent / "more.txt").write_text("")


def rename(path: Path) -> None:
    path.rename(path.with_name("other.npy"))


@pytest.mark.parametrize("change", [append, Path.unlink, add_file, rename, lambda path: shutil.rmtree(path.parent)])
def test_a_component_that_was_altered_is_refused(tmp_path: Path, change: Callable[[Path], object]) -> None:
    out = tmp_path / "out"
    written(out)
    change(out / "two" / "thumbnails.npy")
    with pytest.raises(
        InputError, match=r"^model .*out: two/ is missing or not the one that the bundle was written with"
    ):
        Bundle.open(out, "model")


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    """The Hugging Face Hub keeps files elsewhere, under their hashes, and links to them."""
    first = written(tmp_path / "first")
    for number, file in enumerate(sorted(first.path.rglob("*.npy"))):
        blob = tmp_path / f"blob{number}"
        file.rename(blob)
        file.symlink_to(Path("../..") / blob.name)
    linked = Bundle.open(first.path, "base")
    parts = {"moved": linked.stored("one")}
    second = write_bundle(tmp_path / "deep" / "second", config(), parts, card="", privacy={})
    linked.copy_to(tmp_path / "third")
    shutil.rmtree(first.path)
    for number in range(2):
        (tmp_path / f"blob{number}").unlink()
    expected = rows(1).rows
    for path, name in ((second.path, "moved"), (tmp_path / "third", "one")):
        assert (Bundle.open(path, "model").component(name, Thumbnails).rows == expected).all()


def test_a_component_stays_in_its_bundle(tmp_path: Path) -> None:
    """Whoever packs a bundle does not choose where it is copied to, nor what of the reader's files goes with it."""
    bundle = written(tmp_path / "out")
    content = json.loads((bundle.path / "config.json").read_text())
    secret = tmp_path / "evil"
    secret.mkdir()
    (secret / "key").write_text("secret")
    for name in ("../evil", str(secret), ".", "one/../../evil", "a\n"):
        changed = content | {"components": {name: component_hash(secret)}}
        (bundle.path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(InputError, match=r"config\.json is damaged"):
            Bundle.open(bundle.path, "model")
    # a component with a manifest, and beside its files a link that the manifest does not name
    (bundle.path / "two" / "link").symlink_to(secret / "key")
    manifest = bundle.path / "two" / "manifest.json"
    for files in ({}, {"../../evil/key": "00"}, {str(secret / "key"): "00"}, ["key"], {"link": "00"}):
        manifest.write_text(json.dumps({"files": files}))
        hashes = content["components"] | {"two": component_hash(bundle.path / "two")}
        (bundle.path / "config.json").write_text(json.dumps(content | {"components": hashes}))
        opened, target = Bundle.open(bundle.path, "model"), tmp_path / "copy"
        if files:
            with pytest.raises(InputError, match=r"manifest\.json: is damaged|link: is missing or was altered"):
                opened.copy_to(target)
            assert not target.exists()
        else:
            opened.copy_to(target)
            assert [path.name for path in (target / "two").iterdir()] == ["manifest.json"]
            shutil.rmtree(target)


@pytest.mark.parametrize("content", ['{"one": []}', '{"one": ["a", "b"]}', "[" * 100_000, '{"one": 1, "two": 2}'])
def test_a_damaged_index_is_told(tmp_path: Path, content: str) -> None:
    written(tmp_path / "out")
    (tmp_path / "out" / "model_index.json").write_text(content)
    with pytest.raises(
        InputError, match=r"model_index\.json: is (missing or )?damaged; copy the bundle again"
    ) as caught:
        Bundle.open(tmp_path / "out", "model")
    assert "\n" not in str(caught.value)


def test_a_damaged_statement_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "out")
    assert main(["info", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith(
        "privacy.json is damaged or of another version of rapid; copy the bundle again\n"
    )


def test_two_components_that_changed_places_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    written(out)
    (out / "one").rename(out / "three")
    (out / "two").rename(out / "one")
    (out / "three").rename(out / "two")
    with pytest.raises(InputError, match="one/ is missing or not the one"):
        Bundle.open(out, "model")


def test_a_manifest_vouches_for_the_other_files(tmp_path: Path) -> None:
    """Of a component with a manifest only that is hashed; it holds the hashes of the rest, which its class checks."""
    (tmp_path / "manifest.json").write_text("{}")
    (tmp_path / "values.npy").write_text("large")
    before = component_hash(tmp_path)
    (tmp_path / "values.npy").write_text("other")
    assert component_hash(tmp_path) == before
    (tmp_path / "manifest.json").write_text("{ }")
    assert component_hash(tmp_path) != before


def test_altered_values_are_found_when_they_are_read(
    private_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values are too large to be read each time; keys, which faiss reads, are checked when they are opened."""
    out = Path(shutil.copytree(private_bundle, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints")))
    folder = out / "knowledge_base"
    large = sum((folder / name).stat().st_size for name in ("keys.faiss", "values.npy", "labels.npy"))
    assert Bundle.open(out, "model").verify() == large
    assert main(["info", str(out), "--verify"]) == 0
    assert "every component is the one that config.json names" in capsys.readouterr().err
    for name, at_once in (("values.npy", False), ("keys.faiss", True), ("labels.npy", True)):
        kept = (folder / name).read_bytes()
        (folder / name).write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        bundle = Bundle.open(out, "model")
        if at_once:
            with pytest.raises(InputError, match=rf"{name}: altered"):
                open_knowledge_base(bundle)
        else:
            open_knowledge_base(bundle)
        with pytest.raises(InputError, match=rf"{name}: is missing or was altered; copy the bundle again"):
            bundle.verify()
        assert main(["info", str(out), "--verify"]) == 2
        assert name in capsys.readouterr().err
        (folder / name).write_bytes(kept)
    (folder / "values.npy").unlink()
    with pytest.raises(InputError, match=r"values\.npy: is missing"):
        Bundle.open(out, "model").verify()


def test_a_bundle_of_format_1_is_refused_in_one_clear_line(tmp_path: Path) -> None:
    out = tmp_path / "old"
    out.mkdir()
    content = {"format": 1, "kind": "public", "rapid": "0.1.0", "networks": {}, "settings": {}}
    (out / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        Bundle.open(out, "base")
    assert str(caught.value) == (
        f"base {out}: was made by rapid 0.1.0, whose format this version does not read; make it again with build-kb"
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{}", "was made by another version of rapid, whose format"),
        ('{"format": 3, "rapid": "9.9"}', r"was made by rapid 9\.9, whose format"),
        ('{"format": 2}', r"config\.json is damaged or of another version of rapid"),
        ("[]", "is damaged; copy the bundle again"),
        ("{", "is missing or damaged; copy the bundle again"),
        ("\0\xff", "is missing or damaged; copy the bundle again"),
    ],
)
def test_a_damaged_configuration_is_told(tmp_path: Path, content: str, told: str) -> None:
    written(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=told) as caught:
        Bundle.open(tmp_path / "out", "model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model_index.json", "privacy.json"])
def test_a_bundle_without_one_of_its_files_is_refused(tmp_path: Path, name: str) -> None:
    written(tmp_path / "out")
    (tmp_path / "out" / name).unlink()
    with pytest.raises(InputError, match=rf"{name}: is missing or damaged"):
        Bundle.open(tmp_path / "out", "model")


def test_the_wrong_kind_is_refused(public_bundle: Path, private_bundle: Path) -> None:
    with pytest.raises(InputError, match=r"^base .*is a private bundle, expected a public one; .* build-kb wrote$"):
        Bundle.open(private_bundle, "base", "public")
    with pytest.raises(
        InputError, match=r"^model .*is a public bundle, expected a private one; .* train-private wrote$"
    ):
        Bundle.open(public_bundle, "model", "private")


def test_what_is_no_bundle_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder; give one that build-kb or train-private wrote"):
        Bundle.open(tmp_path / "nowhere", "model")
    with pytest.raises(InputError, match=r"is no bundle \(no config\.json\)"):
        Bundle.open(tmp_path, "model")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(InputError, match="is not finished; rerun its command with --resume"):
        Bundle.open(tmp_path, "model")
    assert not is_finished(tmp_path)


def test_settings_of_another_version_are_told(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, config(settings={"method": "rapid", "colour": 1}), {}, card="", privacy={})
    told = rf"config\.json is damaged or of another version of rapid than {rapid.__version__} \(its setting colour\)"
    with pytest.raises(InputError, match=told):
        bundle.settings_as(RapidSettings)


def test_the_digest_covers_all_that_a_bundle_says(tmp_path: Path) -> None:
    digests = [written(tmp_path / "same").digest, written(tmp_path / "again").digest]
    assert digests[0] == digests[1]
    parts = {"one": rows(1), "two": rows(2)}
    for number, (own, shown, privacy) in enumerate(
        [
            (config(), parts | {"one": rows(3)}, {"epsilon": 1.0}),
            (config(), parts, {"epsilon": 2.0}),
            (config(classes=("a", "c")), parts, {"epsilon": 1.0}),
        ]
    ):
        digests.append(write_bundle(tmp_path / str(number), own, shown, card="", privacy=privacy).digest)
    assert len(set(digests[1:])) == 4


def test_info_tells_each_component(private: Bundle) -> None:
    found = describe(private)
    assert json.loads(json.dumps(found)) == found
    assert found["components"].keys() == PRIVATE.keys()
    denoiser = private.component("denoiser", Denoiser)
    count = sum(p.numel() for p in denoiser.parameters())
    buffers = sum(
        b.numel() for name, b in denoiser.state_dict().items() if name not in dict(denoiser.named_parameters())
    )
    assert found["components"]["denoiser"]["parameters"] == count + buffers
    assert found["components"]["denoiser"]["sha256"] == private.config.components["denoiser"]
    assert (found["kind"], found["method"], found["image"]) == ("private", "rapid", {"size": 32, "channels": 1})
    assert found["privacy"] == private.privacy
    assert "fingerprint" not in found["public"]
    facts = private.config.facts
    assert (found["k"], found["v"], found["knowledge_base"]) == (facts["k"], facts["v"], facts["knowledge_base"])


def test_images_say_where_they_come_from(private: Bundle, public_bundle: Path) -> None:
    assert private.privacy is not None
    told = json.loads(provenance(private)["rapid"])
    assert told == {"synthetic": True, "model": private.name, "sha256": private.digest} | {
        name: private.privacy[name] for name in ("method", "epsilon", "delta", "adjacency")
    }
    assert "epsilon" not in json.loads(provenance(Bundle.open(public_bundle, ""))["rapid"])
