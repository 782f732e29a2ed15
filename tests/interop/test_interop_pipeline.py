"""A bundle as a pipeline of diffusers, and as a model repository of the Hugging Face Hub."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from huggingface_hub import ModelCard
from PIL import Image

from rapid.bundle import Bundle
from rapid.errors import InputError
from rapid.interop.pipeline import RapidPipeline
from rapid.sampling.generate import generate

OVERRIDES = ["generation.attempts=1"]


@pytest.fixture(scope="module")
def pipe(private_bundle: Path) -> RapidPipeline:
    """The private bundle."""
    found = RapidPipeline.from_pretrained(private_bundle, overrides=OVERRIDES)
    found.set_progress_bar_config(disable=True)
    return found


def same(one: Image.Image, other: np.ndarray) -> bool:
    return bool((np.asarray(one) == other).all())


def test_it_is_a_pipeline_of_diffusers(pipe: RapidPipeline, private_bundle: Path) -> None:
    assert isinstance(pipe, DiffusionPipeline)
    assert pipe.components == {"model": pipe.model}
    assert pipe.name_or_path == str(private_bundle)
    assert (pipe.device, pipe.dtype) == (torch.device("cpu"), torch.float32)
    assert DiffusionPipeline.load_config(private_bundle)["_class_name"] == RapidPipeline.__name__
    assert "RapidGenerator" in repr(pipe)


def test_images_are_those_of_the_generator(pipe: RapidPipeline) -> None:
    answer = pipe(3, ["7", 1, "0"], seed=5)
    assert isinstance(answer, ImagePipelineOutput)
    assert (answer.labels, answer.seed) == (["7", "1", "0"], 5)
    expected = generate(pipe.model, 3, [7, 1, 0], 5)
    assert all(isinstance(image, Image.Image) for image in answer.images)
    assert all(same(image, other) for image, other in zip(answer.images, expected.images, strict=True))
    (images,) = pipe(labels=["7", 1, "0"], seed=5, output_type="np", return_dict=False)
    assert images.shape == (3, 32, 32, 1)
    again = DiffusionPipeline.numpy_to_pil(images)
    assert all(same(image, other) for image, other in zip(again, expected.images, strict=True))


def test_numbers_and_labels(pipe: RapidPipeline) -> None:
    assert pipe().labels == ["0"]
    assert pipe(12).labels == [*"012345678901"]
    assert pipe(2, "7").labels == pipe(2, 7).labels == ["7", "7"]
    assert pipe(labels=[3, 3]).labels == ["3", "3"]
    few, many = (pipe(1, seed=1, num_inference_steps=steps) for steps in (5, 50))
    assert not same(few.images[0], np.asarray(many.images[0]))


def test_calls_in_several_threads(pipe: RapidPipeline) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: pipe(3, seed=seed).images, [1, 2, 1, 2, 1]))
    for images, again in zip(found, found[2:], strict=False):
        assert all(same(one, np.asarray(other)) for one, other in zip(images, again, strict=True))


def test_a_generator_of_torch_gives_the_seed(pipe: RapidPipeline) -> None:
    first, second = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    one, other, next_one = pipe(generator=first), pipe(generator=second), pipe(generator=first)
    assert one.seed == other.seed != next_one.seed
    assert same(one.images[0], np.asarray(other.images[0]))


def test_bad_arguments(pipe: RapidPipeline, tmp_path: Path) -> None:
    for words, arguments in (
        ("labels cat: unknown; the model knows 0, 1", {"labels": "cat"}),
        ("labels: 1 given for 2 images", {"num_images": 2, "labels": ["1"]}),
        ("labels: names no classes; leave it out", {"labels": []}),
        ("labels 1.0: must be a class, or a list of classes", {"labels": 1.0}),
        ("num_images 0: must be at least 1", {"num_images": 0}),
        ("num_images 3: must be a whole number", {"num_images": "3"}),
        ("seed -1: must lie in", {"seed": -1}),
        ("seed 1.5: must be a whole number", {"seed": 1.5}),
        ("num_inference_steps 0: must lie in", {"num_inference_steps": 0}),
        ("num_inference_steps True: must be a whole number", {"num_inference_steps": True}),
        ("generator: all images of a call come from one seed", {"generator": [torch.Generator()]}),
        ("output_type latent: choose pil or np", {"output_type": "latent"}),
        ("generator: the seed is drawn from it", {"seed": 1, "generator": torch.Generator()}),
    ):
        with pytest.raises(InputError) as caught:
            pipe(**arguments)  # type: ignore[arg-type]
        assert words in str(caught.value)
    for path in (tmp_path, tmp_path / "none", "./none", "none"):
        with pytest.raises(InputError, match="model "):
            RapidPipeline.from_pretrained(path)
    with pytest.raises(InputError, match="device tpu: choose auto"):
        pipe.to("tpu")
    assert pipe.to("cpu") is pipe
    assert pipe.to(pipe.device) is pipe
    with pytest.raises(NotImplementedError, match="hf upload"):
        pipe.push_to_hub("me/model")


def test_saved_it_is_the_same_bundle_without_its_run(pipe: RapidPipeline, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path / "copy")
    original = pipe.model.bundle
    assert Bundle.open(tmp_path / "copy", "model", "private").digest == original.digest
    kept = {"config.json", "model_index.json", "privacy.json", "README.md", *original.config.components}
    assert {path.name for path in (tmp_path / "copy").iterdir()} == kept
    assert same(pipe(seed=1).images[0], np.asarray(again(tmp_path / "copy")(seed=1).images[0]))
    with pytest.raises(InputError, match="is not empty"):
        pipe.save_pretrained(tmp_path / "copy")


def again(path: Path) -> RapidPipeline:
    found = RapidPipeline.from_pretrained(path, overrides=OVERRIDES)
    found.set_progress_bar_config(disable=True)
    return found


def test_a_repository_that_was_downloaded(private_bundle: Path, tmp_path: Path) -> None:
    """In the layout of the Hub's cache: a snapshot of links to files that are named by their hash."""
    bundle = Bundle.open(private_bundle, "model")
    bundle.copy_to(tmp_path / "bundle")
    cache = tmp_path / "cache" / "models--me--digits"
    (cache / "blobs").mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("f" * 40)
    for number, file in enumerate(sorted(path for path in (tmp_path / "bundle").rglob("*") if path.is_file())):
        blob = cache / "blobs" / str(number)
        link = cache / "snapshots" / ("f" * 40) / file.relative_to(tmp_path / "bundle")
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(file, blob)
        link.symlink_to(blob)
    hub = {"cache_dir": tmp_path / "cache", "local_files_only": True}
    pipe = RapidPipeline.from_pretrained("me/digits", **hub)
    assert pipe.model.bundle.digest == bundle.digest
    assert pipe.name_or_path == "me/digits"
    pipe.save_pretrained(tmp_path / "saved")
    assert not [path for path in (tmp_path / "saved").rglob("*") if path.is_symlink()]
    with pytest.raises(InputError, match="model me/other: is no folder, and no repository"):
        RapidPipeline.from_pretrained("me/other", **hub)


def test_a_public_bundle_and_the_bar(public_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pipe = RapidPipeline.from_pretrained(str(public_bundle))
    assert pipe(2, seed=1).labels == list(pipe.model.classes[:2])
    assert "2/2" in capfd.readouterr().err
    pipe.save_pretrained(tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "encoder")
    with pytest.raises(InputError, match="encoder/ is missing"):
        RapidPipeline.from_pretrained(tmp_path / "copy")


@pytest.mark.parametrize("name", ["public_bundle", "private_bundle"])
def test_its_card_is_one_of_the_hub(name: str, request: pytest.FixtureRequest) -> None:
    card = ModelCard.load(request.getfixturevalue(name) / "README.md")
    data = card.data.to_dict()
    assert (data["library_name"], data["license"]) == ("rapid", "unknown")
    assert data["pipeline_tag"] == "unconditional-image-generation"
    assert ("differential-privacy" in data["tags"]) == (name == "private_bundle")
    assert card.text.lstrip().startswith("# ")
    assert "RapidPipeline.from_pretrained" in card.text


def test_labels_as_other_libraries_have_them(pipe: RapidPipeline) -> None:
    for labels in (torch.tensor([1, 2]), np.array([1, 2]), ("1", 2), [np.int64(1), "2"]):
        assert pipe(labels=labels).labels == ["1", "2"]
    assert pipe(2, torch.tensor(3)).labels == ["3", "3"]
