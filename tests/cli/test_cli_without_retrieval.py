"""`retrieval.enabled=false` as a user meets it: bundles without trajectory encoder and knowledge base."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests_process import Program, run
from tests_support import TINY, export_networks

from rapid.bundle import Bundle
from rapid.errors import InputError
from rapid.interop.pipeline import RapidPipeline
from rapid.methods.rapid.settings import RapidSettings

OFF = ("retrieval.enabled=false", "private.objective=late", "generation.retrieval=none")
RECORDS = {"encoder", "knowledge_base"}


def chosen(*overrides: str) -> list[str]:
    return [word for one in (*TINY, *overrides) for word in ("--set", one)]


def done(*arguments: object) -> str:
    """Standard output of a command that succeeds."""
    found = run(*arguments)
    assert found.returncode == 0, found.stderr
    return found.stdout


def refused(*arguments: object) -> str:
    """The line of a command that is refused."""
    found = run(*arguments)
    assert found.returncode == 2
    assert len(found.stderr.strip().splitlines()) == 1
    return found.stderr


def config(path: Path) -> Any:
    return json.loads((path / "config.json").read_text())


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Colour images whose two classes say nothing about them, so that retrieval finds nothing."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    labels = np.arange(120) % 2
    coarse = rng.uniform(0, 250, (120, 4, 4, 3))
    pixels = coarse.repeat(4, 1).repeat(4, 2).clip(0, 255).astype(np.uint8)
    np.savez(folder / "public.npz", images=pixels, labels=labels, classes=["dark", "light"])
    np.savez(folder / "unlabelled.npz", images=pixels)
    np.savez(folder / "private.npz", images=pixels[::-1, :, ::-1], labels=labels[::-1], classes=["x", "y"])
    return folder


@pytest.fixture(scope="module")
def base(images: Path) -> Path:
    """The public bundle by `auto`."""
    said = done("build-kb", "--public", images / "public.npz", "--out", images / "base", "--minutes", 0.02)
    assert "retrieval: off; of the nearest public images" in said
    assert "retrieval: off (retrieval.enabled)" in said
    assert "encoder: loss" not in said
    assert not re.search(r"networks: .*encoder", said)
    assert "records in the knowledge base" not in said
    return images / "base"


@pytest.fixture(scope="module")
def trained(images: Path, base: Path) -> tuple[object, ...]:
    """The command of the private stage, which has run once."""
    command = (
        "train-private", "--base", base, "--private", images / "private.npz", "--epsilon", 5, "--delta", 1e-3, "--out",
        images / "model", "--ledger", images / "ledger.jsonl", "--minutes", 0.02, "--set", "private.expected_batch=16",
    )  # fmt: skip
    done(*command)
    return command


@pytest.fixture(scope="module")
def model(images: Path, trained: tuple[object, ...]) -> Path:
    """The private bundle."""
    assert trained
    return images / "model"


@pytest.fixture(scope="module")
def off(letters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A public bundle of letters, with settings as those of `public_bundle` but for retrieval."""
    out = tmp_path_factory.mktemp("off") / "public"
    done("build-kb", "--public", letters, "--out", out, "--preset", "demo", *chosen(*OFF))
    return out


@contextmanager
def served(bundle: Path) -> Iterator[httpx.Client]:
    with Program("serve", "--model", bundle, "--device", "cpu", "--port", 0) as server:
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found, server.communicate()
        with httpx.Client(base_url=found.group(), timeout=60) as client:
            begin = time.monotonic()
            while client.get("/readyz").status_code != 200:
                assert time.monotonic() - begin < 60
                time.sleep(0.05)
            yield client
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def test_bundles_hold_no_trace_of_it(base: Path, model: Path) -> None:
    for path in (base, model):
        content = config(path)
        assert not RECORDS & set(content["components"])
        assert not RECORDS & {one.name for one in path.iterdir()}
        assert not {"k", "v", "knowledge_base", "retrieval"} & set(content["facts"])
        assert "knowledge base" in (path / "README.md").read_text()
        assert "value at step v" not in (path / "README.md").read_text()
        shown = json.JSONDecoder().raw_decode(done("info", path, "--verify"))[0]
        assert not RECORDS & set(shown["components"])
    assert "encoder_loss" not in config(base)["facts"]["quality"]
    assert {"decoded", "halves"} == set(config(base)["facts"]["quality"]["autoencoder_frechet"])
    assert [line.split(":")[0] for line in config(base)["facts"]["findings"]] == [
        "autoencoder", "floor", "denoiser", "retrieval", "probe"
    ]  # fmt: skip


def test_both_stages_are_resumed(base: Path, model: Path, images: Path, trained: tuple[object, ...]) -> None:
    before = config(base)
    for name in ("config.json", "model_index.json"):
        (base / name).unlink()
    shutil.rmtree(base / "denoiser")
    build = ("build-kb", "--public", images / "public.npz", "--out", base, "--minutes", 0.02)
    assert "not finished" in refused("info", base) or "holds an earlier run" in refused(*build)
    done(*build, "--resume")
    assert config(base) == before
    digest = Bundle.open(model, "model").digest
    done(*trained, "--resume")
    assert Bundle.open(model, "model").digest == digest


@pytest.mark.filterwarnings("ignore:the probe takes .*% of the images")
def test_images_are_made_and_served(base: Path, model: Path, tmp_path: Path) -> None:
    for path, names in ((base, ["dark", "light"]), (model, ["x", "y"])):
        out = tmp_path / f"{path.name}.npz"
        done("generate", "--model", path, "--count", 4, "--out", out, "--seed", 1)
        with np.load(out) as archive:
            assert archive["images"].shape == (4, 16, 16, 3)
            assert archive["classes"].tolist() == names
            made = archive["images"]
        if path == base:
            # there are no moments in a public bundle: its images begin from noise
            done("generate", "--model", path, "--count", 4, "--out", tmp_path / "none.npz", "--seed", 1, "--set",
                 "generation.retrieval=none")  # fmt: skip
            with np.load(tmp_path / "none.npz") as archive:
                np.testing.assert_array_equal(made, archive["images"])
        with served(path) as client:
            answer = client.post("/generate", json={"count": 2, "seed": 3}).json()
            assert len(answer["images"]) == 2
            assert answer["entries"] == [None, None]
            response = client.get("/entries/0")
            assert response.status_code == 422
            assert "no knowledge base" in response.text


def test_requests_for_records_are_refused(base: Path, model: Path, tmp_path: Path) -> None:
    for path in (base, model):
        for way in ("query", "class"):
            asked = ("--set", f"generation.retrieval={way}")
            told = f"must be none or moments without a knowledge base (retrieval.enabled=false), not {way}"
            assert told in refused("generate", "--model", path, "--count", 1, "--out", tmp_path / "images.npz", *asked)
            with pytest.raises(InputError, match="must be none or moments without a knowledge base"):
                RapidPipeline.from_pretrained(path, overrides=[asked[1]])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            OFF[:1],
            "private.objective must be late or ldm without a knowledge base (retrieval.enabled=false), not rapid",
        ),
        (OFF[:2], "generation.retrieval must be none or moments without"),
        ((*OFF[:2], "generation.retrieval=class"), "not class"),
        ((*OFF, "private.distillation.sampling={steps: 5}"), "private.distillation.sampling.retrieval must be none or"),
        ((*OFF, "retrieval.enabled=maybe"), "retrieval.enabled"),
    ],
)
def test_settings_that_need_records_are_refused(
    letters: Path, tmp_path: Path, overrides: tuple[str, ...], told: str
) -> None:
    out = tmp_path / "out"
    assert told in refused("build-kb", "--public", letters, "--out", out, "--preset", "demo", *chosen(*overrides))
    assert not out.exists()


def test_private_settings_that_need_records_are_refused(off: Path, digits: Path, tmp_path: Path) -> None:
    train = ("train-private", "--base", off, "--private", digits, "--epsilon", 1, "--out", tmp_path / "out")
    train = (*train, "--ledger", tmp_path / "ledger.jsonl")
    for more, told in (
        (("--set", "private.objective=rapid"), "private.objective must be late or ldm"),
        (("--preset", "letters-mnist"), "must be late or ldm"),
        (("--set", "retrieval.enabled=true"), "the public bundle (--base) fixes 'retrieval'"),
    ):
        assert told in refused(*train, *more)
    assert not list(tmp_path.iterdir())


def test_networks_are_reused_with_and_without(off: Path, letters: Path, public_bundle: Path, tmp_path: Path) -> None:
    """What both kinds of bundle have is the same: only encoder and knowledge base are made, or left out."""
    build = ("build-kb", "--public", letters, "--preset", "demo", "--out")
    added = run(*build, tmp_path / "with", "--networks", off, *chosen())
    assert added.returncode == 0, added.stderr
    bars = {line.split(":")[0].strip() for line in added.stderr.replace("\r", "\n").split("\n")}
    assert bars & {"autoencoder", "denoiser", "encoder", "probe", "knowledge base"} == {"encoder", "knowledge base"}
    done(*build, tmp_path / "without", "--networks", public_bundle, *chosen(*OFF))
    assert config(tmp_path / "with")["recipes"] == config(public_bundle)["recipes"]
    kept = {name: digest for name, digest in config(public_bundle)["components"].items() if name not in RECORDS}
    assert config(tmp_path / "without")["components"] == kept


def test_a_bundle_given_as_networks_brings_its_settings(public_bundle: Path, letters: Path, tmp_path: Path) -> None:
    build = ("build-kb", "--public", letters, "--networks", public_bundle, "--out")
    done(*build, tmp_path / "same")
    assert config(tmp_path / "same")["components"] == config(public_bundle)["components"]
    done(*build, tmp_path / "other", "--set", "retrieval.k=500")
    same, other = config(public_bundle), config(tmp_path / "other")
    assert other["settings"]["retrieval"] == same["settings"]["retrieval"] | {"k": 500}
    changed = {name for name, digest in other["components"].items() if digest != same["components"][name]}
    assert changed == RECORDS
    assert "--minutes: is for settings that choose themselves" in refused(*build, tmp_path / "no", "--minutes", 1)


def test_exported_networks(off: Path, digits: Path, networks: Bundle, tmp_path: Path) -> None:
    alone = export_networks(off, tmp_path / "alone").path
    assert not (alone / "encoder").exists()
    build = ("build-kb", "--public", digits, "--out")
    done(*build, tmp_path / "digits", "--networks", alone)
    told = refused(*build, tmp_path / "refused", "--networks", alone, "--set", "retrieval.enabled=true")
    assert "retrieval.enabled=" not in told
    assert "retrieval.enabled: the networks (--networks) fix it" in told
    # networks with an encoder can do without it
    done(*build, tmp_path / "left", "--networks", networks.path, *(word for one in OFF for word in ("--set", one)))
    for name in ("digits", "left"):
        assert not RECORDS & set(config(tmp_path / name)["components"])
    assert not (tmp_path / "refused").exists()


def test_an_unlabelled_set_has_no_floor(images: Path, tmp_path: Path) -> None:
    done("build-kb", "--public", images / "unlabelled.npz", "--out", tmp_path / "base", "--minutes", 0.02)
    facts = config(tmp_path / "base")["facts"]
    assert [line.split(":")[0] for line in facts["findings"]] == ["autoencoder", "denoiser", "retrieval"]
    assert set(facts["quality"]) == {"autoencoder_psnr"}
    done("generate", "--model", tmp_path / "base", "--count", 2, "--out", tmp_path / "images.npz")


def test_records_of_earlier_versions_do_not_name_it(public_bundle: Path, off: Path) -> None:
    assert "enabled" not in config(public_bundle)["settings"]["retrieval"]
    assert Bundle.open(public_bundle, "base").settings_as(RapidSettings).retrieval.enabled
    assert config(off)["settings"]["retrieval"]["enabled"] is False
