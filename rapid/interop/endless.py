"""A dataset of PyTorch that never ends: images are made while a network is trained on them."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from rapid.bundle import Bundle
from rapid.data import to_unit_range
from rapid.errors import InputError
from rapid.methods import check_generation, open_generator, settings_for_training
from rapid.runtime import choose_device
from rapid.sampling.generate import check_seed, check_whole, generate, resolve_labels
from rapid.sampling.generator import Generator


class EndlessImages(IterableDataset[tuple[Tensor, int | Tensor]]):
    """Pairs of an image, float32 (C, H, W) in [-1, 1], and its class index, made when they are asked for.

    Images are made `batch_size` at a time. Batch number b depends on the seed, the epoch and b. Of W workers of a
    `DataLoader`, worker w makes the batches w, w + W, ..., so workers never make the same image, and a loader with the
    same `batch_size` yields the same batches with any number of workers. The bundle is opened in the process that makes
    the images. On a GPU, and wherever images were made in this process before, start the workers with
    `multiprocessing_context="spawn"`.

    Every image is drawn anew, but a RAPID bundle whose late steps start at v without fresh noise (no `start`) makes at
    most one image of each class from a record of its knowledge base.

    Args:
        model: a bundle.
        labels: class or classes to cycle through, by name or number; None: all classes. A class may stand there several
            times, to be drawn more often.
        seed: 0..2^63 - 1; None draws one.
        batch_size: images made at a time.
        device: auto, cpu or cuda.
        overrides: generation settings, as `generation.steps=50`.
        soft_labels: instead of its class index, an image has the probabilities of the classes by the probe, float32
            (classes,), which `cross_entropy` takes as well.
        for_training: as `rapid generate --for-training`: varied images, none refused, with soft labels.

    Attributes:
        classes: names of the classes; empty for a model without any.
        image_shape: (H, W) or (H, W, 3).
        seed: as given or drawn.
        epoch: see `set_epoch`.

    Raises:
        InputError: not a bundle that makes images, an argument out of range, or no probe for images to train on.
    """

    def __init__(
        self,
        model: str | Path,
        labels: int | str | Sequence[int | str] | None = None,
        seed: int | None = None,
        batch_size: int = 64,
        device: str = "auto",
        overrides: Sequence[str] = (),
        *,
        soft_labels: bool = False,
        for_training: bool = False,
    ) -> None:
        check_whole("batch_size", batch_size)
        if batch_size < 1:
            raise InputError("batch_size", "must be at least 1", batch_size)
        if seed is not None:
            check_whole("seed", seed)
            check_seed(seed)
        overrides = [overrides] if isinstance(overrides, str) else list(overrides)
        bundle = Bundle.open(Path(model), "model")
        # not first where a worker opens the model
        choose_device(device)
        check_generation(bundle, overrides)
        for field, asked in (("for_training", for_training), ("soft_labels", soft_labels)):
            if asked:
                settings_for_training(bundle, field)
        self.classes, self.image_shape = bundle.classes, bundle.image_shape
        self.seed = secrets.randbits(53) if seed is None else seed
        self.epoch = 0
        self._path, self._device, self._overrides = Path(model), device, tuple(overrides)
        self._batch_size, self._for_training = batch_size, for_training
        self._soft_labels = soft_labels or for_training
        self._opened: tuple[int, Generator] | None = None
        labels = [labels] if isinstance(labels, int | str | np.integer) else labels
        self._cycle = None if labels is None else resolve_labels(self.classes, labels)
        if self._cycle == []:
            raise InputError("labels", "names no classes; leave it out for all classes")

    @property
    def generator(self) -> Generator:
        """The model, opened once in each process."""
        if self._opened is None or self._opened[0] != os.getpid():
            opened = open_generator(self._path, self._device, self._overrides, for_training=self._for_training)
            self._opened = os.getpid(), opened
        return self._opened[1]

    def set_epoch(self, epoch: int) -> None:
        """Other images from the next iteration on; without it every iteration begins with the same ones.

        Args:
            epoch: at least 0. Call it before the loader's iterator is made, and without persistent workers.

        Raises:
            InputError: it is negative, or no whole number.
        """
        check_whole("epoch", epoch)
        if epoch < 0:
            raise InputError("epoch", "must be at least 0", epoch)
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int | Tensor]]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        trajectories = self.generator.trajectories()
        for number in itertools.count(first, step):
            samples = generate(
                self.generator,
                self._batch_size,
                self._labels_of(number),
                self._seed_of(number),
                soft_labels=self._soft_labels,
                trajectories=trajectories,
            )
            labels: Sequence[int | Tensor] = [-1] * self._batch_size
            if samples.soft_labels is not None:
                labels = torch.from_numpy(samples.soft_labels).unbind()
            elif samples.labels is not None:
                labels = samples.labels.tolist()
            yield from zip(to_unit_range(samples.images), labels, strict=True)

    def __getstate__(self) -> dict[str, Any]:
        # a worker opens the bundle by itself
        return self.__dict__ | {"_opened": None}

    def _labels_of(self, number: int) -> list[int] | None:
        """Class indices of a batch; None for a model without classes."""
        cycle = range(len(self.classes)) if self._cycle is None else self._cycle
        places = range(number * self._batch_size, (number + 1) * self._batch_size)
        return [cycle[place % len(cycle)] for place in places] if cycle else None

    def _seed_of(self, number: int) -> int:
        """Seed of a batch: hashed, so that neighbouring seeds have no batches in common."""
        words = np.random.SeedSequence((self.seed, self.epoch, number)).generate_state(1, np.uint64)
        return int(words[0] >> np.uint64(1))
