"""A bundle as a pipeline of diffusers: `RapidPipeline.from_pretrained(path)`.

The pipeline has one module, the bundle's generator: which components a bundle has, and how images are sampled from
them, is a matter of its method, and a bundle is checked as a whole when it is opened. So loading, saving and moving are
the pipeline's own; call, output and progress bar are those of diffusers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NoReturn, Self

import numpy as np
import torch
from diffusers import DiffusionPipeline, ImagePipelineOutput
from huggingface_hub import snapshot_download
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from rapid.bundle import Bundle
from rapid.errors import InputError
from rapid.methods import generator_of
from rapid.runtime import choose_device
from rapid.sampling.generate import check_whole, generate, resolve_labels
from rapid.sampling.generator import Generator, Trajectories
from rapid.sampling.streams import MAX_SEED

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""What the name of a repository looks like."""
NAMES = {"count": "num_images", "steps": "num_inference_steps"}
"""Arguments that diffusers calls otherwise."""


@dataclass
class RapidPipelineOutput(ImagePipelineOutput):  # type: ignore[misc]
    """Generated images.

    Attributes:
        images: PIL images, or float32 (N, H, W, C) in [0, 1].
        labels: name of the class of each image; None from a model without classes.
        seed: the seed that makes the same images again.
    """

    labels: list[str] | None = None
    seed: int | None = None


class RapidPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Images from a bundle, as diffusers' pipelines make them.

    Args:
        model: a generator of any method.

    Attributes:
        model: as given.
    """

    def __init__(self, model: Generator) -> None:
        super().__init__()
        self.register_modules(model=model)
        self._overrides: tuple[str, ...] = ()
        self._device = torch.device("cpu")
        self._spare: list[Trajectories] = []

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | PathLike[str],
        *,
        device: str = "cpu",
        overrides: Sequence[str] = (),
        revision: str | None = None,
        cache_dir: str | PathLike[str] | None = None,
        token: str | bool | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Open a bundle.

        Args:
            pretrained_model_name_or_path: its folder, or a repository of the Hugging Face Hub that has its files.
            device: auto, cpu or cuda.
            overrides: generation settings, as `generation.steps=50`.
            revision: branch, tag or commit of a repository.
            cache_dir: where a repository is downloaded to.
            token: for a private repository.
            local_files_only: use what was downloaded before.

        Raises:
            InputError: neither a finished bundle nor the name of a repository, a bundle that makes no images, or an
                unknown device or setting.
        """
        path = Path(pretrained_model_name_or_path)
        if not path.exists() and REPOSITORY.fullmatch(str(path)):
            try:
                folder = snapshot_download(
                    str(path),
                    revision=revision,
                    cache_dir=None if cache_dir is None else str(cache_dir),
                    token=token,
                    local_files_only=local_files_only,
                )
            except (OSError, ValueError) as error:
                # what the Hub's client raises if there is no such repository or name, or no network
                problem = f"is no folder, and no repository of the Hub that can be read ({type(error).__name__})"
                raise InputError("model", problem, path) from error
            path = Path(folder)
        place = choose_device(device)
        overrides = [overrides] if isinstance(overrides, str) else overrides
        pipeline = cls(generator_of(Bundle.open(path, "model"), place, overrides))
        pipeline._overrides, pipeline._device = tuple(overrides), place
        pipeline.register_to_config(_name_or_path=str(pretrained_model_name_or_path))
        return pipeline

    @torch.no_grad()
    def __call__(
        self,
        num_images: int | None = None,
        labels: str | int | Sequence[str | int] | Tensor | NDArray[np.int64] | None = None,
        *,
        seed: int | None = None,
        generator: torch.Generator | None = None,
        num_inference_steps: int | None = None,
        output_type: Literal["pil", "np"] = "pil",
        return_dict: bool = True,
    ) -> RapidPipelineOutput | tuple[list[Image.Image] | NDArray[np.float32]]:
        """Generate images.

        Args:
            num_images: how many; default: one for each entry of `labels`, or one.
            labels: class of each image by name or number, or one class for all; None: all classes in turn.
            seed: 0..2^63 - 1; equal calls with equal seeds give equal images.
            generator: of random numbers, from which the seed is drawn; it advances.
            num_inference_steps: sampling steps; None: the model's default.
            output_type: pil, or np for float32 (N, H, W, C) in [0, 1].
            return_dict: False returns a tuple of the images alone.

        Raises:
            InputError: an argument is out of range.
        """
        if output_type not in ("pil", "np"):
            raise InputError("output_type", "choose pil or np", output_type)
        if seed is not None and generator is not None:
            raise InputError("generator", "the seed is drawn from it; give seed or generator")
        if isinstance(generator, list | tuple):
            raise InputError("generator", "all images of a call come from one seed; give one generator")
        for field, value in (("num_images", num_images), ("seed", seed), ("num_inference_steps", num_inference_steps)):
            if value is not None:
                check_whole(field, value)
        if generator is not None:
            seed = int(torch.randint(0, MAX_SEED, (), generator=generator, device=generator.device))
        count, chosen = self._wanted(num_images, labels)
        with self.progress_bar(total=count) as bar:

            def advance(done: int, _: int) -> None:
                bar.update(done - bar.n)

            # a call in another thread makes others
            spare = self._spare
            trajectories = spare.pop() if spare else self.model.trajectories()
            try:
                samples = generate(
                    self.model, count, chosen, seed, advance, num_inference_steps, trajectories=trajectories
                )
            except InputError as error:
                raise InputError(NAMES.get(error.field, error.field), error.problem, error.value) from None
            spare.append(trajectories)
        images: list[Image.Image] | NDArray[np.float32]
        if output_type == "pil":
            images = [Image.fromarray(image) for image in samples.images]
        else:
            images = np.divide(samples.images.reshape(*samples.images.shape[:3], -1), 255, dtype=np.float32)
        if not return_dict:
            return (images,)
        names = None if samples.labels is None else [self.model.classes[label] for label in samples.labels]
        return RapidPipelineOutput(images, names, samples.seed)

    @property
    def device(self) -> torch.device:
        """Where the networks run."""
        return self._device

    def to(self, device: str | torch.device) -> Self:
        """Move the networks to auto, cpu, cuda or the `device` of a pipeline here; the pipeline itself is returned.

        Raises:
            InputError: an unknown device.
        """
        same = str(device) == str(self._device)
        place = self._device if same else choose_device(str(device))
        if place != self._device:
            self.register_modules(model=generator_of(self.model.bundle, place, self._overrides))
            self._device, self._spare = place, []
        return self

    def save_pretrained(self, save_directory: str | PathLike[str]) -> None:
        """Copy the bundle, without the state of its run, to a new folder.

        Raises:
            InputError: the folder exists and is not empty.
        """
        self.model.bundle.copy_to(Path(save_directory))

    def push_to_hub(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: diffusers would replace the model card, which has the privacy statement.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("use save_pretrained(FOLDER), and upload the folder: hf upload USER/NAME FOLDER")

    def _wanted(self, count: int | None, labels: object) -> tuple[int, list[int] | None]:
        """The number of images, and the class index of each; None for all classes in turn."""
        if labels is None:
            return 1 if count is None else count, None
        if isinstance(labels, Tensor | np.ndarray):
            labels = labels.tolist()
        if isinstance(labels, str | int | np.integer):
            count = 1 if count is None else count
            one = labels if isinstance(labels, str) else int(labels)
            return count, resolve_labels(self.model.classes, [one]) * count
        if not isinstance(labels, Sequence):
            raise InputError("labels", "must be a class, or a list of classes", labels)
        if not labels:
            raise InputError("labels", "names no classes; leave it out for all classes")
        chosen = resolve_labels(self.model.classes, labels)
        return len(chosen) if count is None else count, chosen
