"""The private stage from a public bundle and private images to a finished private bundle."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rapid.bundle.card import private_card
from rapid.bundle.format import PRIVACY, Bundle, BundleConfig, is_finished, write_config
from rapid.config.sections import PrivateSettings, Settings
from rapid.data import ImageSet, fit_images, load_images
from rapid.diffusion import Schedule
from rapid.dp.accounting import Release
from rapid.dp.budget import Budget, allot
from rapid.dp.ledger import Ledger, Limit, default_path
from rapid.dp.overlap import check_overlap, smallest_found
from rapid.dp.randomness import Randomness
from rapid.dp.ranks import Ranks
from rapid.dp.releases import default_delta
from rapid.dp.spending import Charge
from rapid.dp.statement import privacy_statement
from rapid.dp.training import select_trainable, steps_taken, train_private
from rapid.errors import InputError, LostRank, PrivacyRefused
from rapid.files import content_hash, replacing, write_json
from rapid.methods.rapid.networks import encode_all
from rapid.methods.rapid.objectives import PrivateObjective, Retriever, uses_retrieval
from rapid.nn import Denoiser
from rapid.probe.head import train_probe
from rapid.probe.network import Probe
from rapid.runtime import process_rank, uninterrupted
from rapid.training.run_folder import RunFolder

Json = dict[str, Any]

COPIED = ("autoencoder", "encoder", "knowledge_base")


@dataclass(frozen=True)
class _Run:
    """What the parts of a private stage share; `images` are those of this rank."""

    public: Bundle
    images: ImageSet
    run_folder: RunFolder
    settings: Settings
    device: torch.device
    ranks: Ranks

    def done(self, name: str) -> bool:
        """Whether an earlier run made this part: what was released once is not made again."""
        out = self.run_folder.out
        return bool(self.ranks.broadcast(is_finished(out) or (out / name).is_dir()))

    def keep(self, name: str, network: Denoiser | Probe) -> None:
        """Write a part; the first rank does."""
        if self.ranks.first:
            with replacing(self.run_folder.out / name) as target:
                network.save(target)


def train_private_bundle(  # noqa: PLR0913 - each is an argument of the command
    base: Path,
    private: Path,
    out: Path,
    settings: Settings,
    *,
    epsilon: float,
    delta: float | None,
    device: torch.device,
    resume: bool,
    ranks: Ranks | None = None,
    ledger: Path | None = None,
) -> Bundle | None:
    """Fine-tune the late denoising steps of a public bundle on private images with (epsilon, delta)-DP.

    Args:
        base: public bundle.
        private: private image set; labels become the classes of the new model.
        out: new folder, or with `resume` one that an earlier run with the same arguments began.
        settings: those of `base` with the private and generation sections wanted.
        epsilon: budget, > 0.
        delta: in (0, 1), default 1 / (N ln N).
        device: where to train.
        resume: go on with what `out` holds.
        ranks: the processes that share the work; all are given the same arguments, and the first one writes `out`.
        ledger: file in which the run is charged before its first step; default: `ledger.default_path`.

    Returns:
        The finished private bundle; None on all ranks but the first.

    Raises:
        InputError: bad images or arguments, or an `out` that holds something else.
        PrivacyRefused: private images are among the public ones of `base`, or their limit would be exceeded.
        LostRank: another rank is gone.
    """
    ranks = ranks or Ranks()

    ranks.agree("--device", device.type.encode())
    book = Ledger(ledger or default_path()) if ranks.first else None
    public, images, account, denoiser, budget, asked = ranks.all_or_none(
        lambda: _prepare(base, private, out, settings, epsilon, delta, device, book)
    )
    # the first rank's, because another kind of CPU may solve for another last digit
    budget = ranks.broadcast(budget)
    record = asked | budget.record()
    ranks.agree("the settings or --base", json.dumps(record, sort_keys=True).encode())
    ranks.agree("--private", images.fingerprint().encode())
    with ExitStack() as stack:

        def enter() -> RunFolder:
            run_folder = RunFolder.enter(out, "train-private", record, resume=resume)
            return stack.enter_context(run_folder) if ranks.first else RunFolder(out)

        run = _Run(public, _part(images, ranks), ranks.all_or_none(enter), settings, device, ranks)
        ranks.all_or_none(lambda: stack.enter_context(_charged(run, book, account, budget, asked)) if book else None)
        _check_overlap(run, budget, len(images))
        _train_probe(run, budget)
        _train_denoiser(run, denoiser, budget)
        if not ranks.first:
            return None
        if not is_finished(out):
            _finish(public, images.classes, out, budget, settings)
            run.run_folder.leave()
        return Bundle.open(out, "--out", "private")


@contextmanager
def _charged(run: _Run, ledger: Ledger, account: str, budget: Budget, asked: Json) -> Iterator[None]:
    """Reserve all that the run may make known; on an orderly stop settle for what it has."""
    if is_finished(run.run_folder.out):
        yield
        return
    charge = Charge(ledger, account, run.run_folder.run_name(), Limit(asked["epsilon"], asked["delta"]))
    try:
        charge.reserve(budget.denoiser.releases())
    except PrivacyRefused:
        run.run_folder.discard()
        raise
    try:
        yield
    except (KeyboardInterrupt, LostRank, PrivacyRefused):
        with uninterrupted():
            charge.settle(_taken(run.run_folder, budget))
        raise
    charge.settle(budget.denoiser.releases())


def _taken(run_folder: RunFolder, budget: Budget) -> list[Release]:
    """What an unfinished run in this folder has made known."""
    taken = [budget.overlap] if budget.overlap and _overlap_result(run_folder).exists() else []
    for name, plan, title in (("probe", budget.probe, "probe"), ("denoiser", budget.denoiser, "private")):
        if plan is None:
            continue
        steps = plan.steps if (run_folder.out / name).is_dir() else steps_taken(run_folder.checkpoint(title))
        taken.append(Release(plan.noise_multiplier, plan.sample_rate, steps))
    return taken


def _overlap_result(run_folder: RunFolder) -> Path:
    return run_folder.checkpoint("overlap").with_suffix(".json")


def _prepare(
    base: Path,
    private: Path,
    out: Path,
    settings: Settings,
    epsilon: float,
    delta: float | None,
    device: torch.device,
    ledger: Ledger | None,
) -> tuple[Bundle, ImageSet, str, Denoiser, Budget, Json]:
    """Read and check everything before anything is written; last, what was asked for, ready for JSON.

    The third is the images' account in the ledger, of the first rank.
    """
    if settings.private.noise_source == "device" and device.type == "cpu":
        raise InputError("--set private.noise_source=device: is for --device cuda; use chacha20 on a CPU")
    public = Bundle.open(base, "--base", "public")
    loaded = load_images(private, "--private")
    # as they are on disk, so that it is the same at every size
    account = ledger.account(loaded.images) if ledger else ""
    images = fit_images(loaded, settings.image, f"--private {private}")
    denoiser = public.public_denoiser().with_classes(len(images.classes)).to(device)
    select_trainable(denoiser, settings.private.trainable)
    probed = "probe" in public.config.networks and images.labels is not None
    if settings.private.overlap.share > 0:
        public.thumbnails()
    if settings.private.neighbours > (entries := len(public.knowledge_base())):
        raise InputError(f"--set private.neighbours={settings.private.neighbours}: --base has {entries:,} entries")
    # public numbers only: nothing that depends on the pixels or on how many images a class has
    asked = {
        "settings": settings.model_dump(mode="json"),
        "epsilon": epsilon,
        "delta": default_delta(len(images)) if delta is None else delta,
        "dataset_size": len(images),
        "base": public.config.networks,
        "classes": list(images.classes),
    }
    budget = _budget(asked, settings.private, RunFolder(out).earlier(), probed=probed)
    return public, images, account, denoiser, budget, asked


def _check_overlap(run: _Run, budget: Budget, size: int) -> None:
    """Refuse private images that are among the public ones."""
    if budget.overlap is None or run.ranks.broadcast(is_finished(run.run_folder.out)):
        return
    check_overlap(
        run.images.images,
        run.public.thumbnails(),
        budget.overlap,
        _overlap_result(run.run_folder),
        run.ranks,
        size=size,
        delta=budget.denoiser.delta,
    )


def _train_probe(run: _Run, budget: Budget) -> None:
    """Write `probe/`, if the budget has one."""
    if budget.probe is None or run.done("probe"):
        return
    public = run.public.probe()
    assert public is not None
    state = run.run_folder.checkpoint("probe")
    run.keep(
        "probe",
        train_probe(public, run.images, budget.probe, run.settings.private, run.device, state, run.ranks),
    )


def _train_denoiser(run: _Run, denoiser: Denoiser, budget: Budget) -> None:
    """Write `denoiser/`. Classes start as blends of public ones that the probe likens."""
    if run.done("denoiser"):
        return
    if run.ranks.first and budget.probe is not None:
        probe = Probe.load(run.run_folder.out / "probe")
        denoiser.blend_classes(run.public.public_denoiser(), probe.resemblance())
    retriever = _retriever(run.public, run.settings, run.device) if uses_retrieval(run.settings) else None
    objective = _objective(run.public, run.images, denoiser, retriever, run.settings, run.device)
    state = run.run_folder.checkpoint("private")
    train_private(denoiser, objective, budget.denoiser, run.settings.private, state, run.ranks)
    run.keep("denoiser", denoiser)


def _part(images: ImageSet, ranks: Ranks) -> ImageSet:
    """The images of this rank; the others never reach its network."""
    own = np.asarray(ranks.part(len(images)), dtype=np.int64)
    labels = None if images.labels is None else images.labels[own]
    return replace(images, images=images.images[own], labels=labels)


def _budget(asked: Json, settings: PrivateSettings, earlier: Json | None, *, probed: bool) -> Budget:
    """That of the earlier run in the same folder, if the same was asked for; otherwise a new one."""
    size, delta = asked["dataset_size"], asked["delta"]
    if earlier is not None and all(earlier.get(name) == value for name, value in asked.items()):
        return Budget.from_record(earlier, asked["epsilon"])
    budget = allot(settings, size, asked["epsilon"], delta, probed=probed)
    # now, because it may not be computable, and steps must not be spent for a statement that cannot be made
    budget.denoiser.epsilon_group()
    if budget.overlap and (least := smallest_found(budget.overlap)) > size and process_rank() == 0:
        warnings.warn(
            f"at this epsilon the overlap check would need {least:,} images to be sure to find that public and private "
            f"ones overlap, and --private has {size:,}: make sure of it yourself",
            stacklevel=2,
        )
    if delta > 1 / size and process_rank() == 0:
        warnings.warn(
            f"--delta {delta:g} is more than 1/N = {1 / size:.1e}: publishing a random image would satisfy it",
            stacklevel=2,
        )
    return budget


def _retriever(public: Bundle, settings: Settings, device: torch.device) -> Retriever:
    return Retriever(
        schedule=Schedule.build(settings.schedule).to(device),
        denoiser=public.public_denoiser().to(device).requires_grad_(False),
        encoder=public.encoder().to(device),
        knowledge_base=public.knowledge_base(),
        k=settings.retrieval.k,
        neighbours=settings.private.neighbours,
    )


def _objective(
    public: Bundle,
    images: ImageSet,
    denoiser: Denoiser,
    retriever: Retriever | None,
    settings: Settings,
    device: torch.device,
) -> PrivateObjective:
    """The per-example losses. Latents of the private images are made here and stay in memory."""
    latents = encode_all(public.autoencoder().to(device), images.images, device)
    known = None if images.labels is None else torch.from_numpy(images.labels).to(device)
    labels = denoiser.null_labels(len(images)) if known is None else known
    return PrivateObjective(settings, denoiser, retriever, latents, labels, Randomness())


def _finish(public: Bundle, classes: tuple[str, ...], out: Path, budget: Budget, settings: Settings) -> None:
    """Copy the public parts, write the statement and the card, and last `config.json`."""
    sources = {name: name for name in COPIED} | {"public_denoiser": "denoiser"}
    for name, source in sources.items():
        if not (out / name).is_dir():
            with replacing(out / name) as target:
                # hard links save space where the file system allows them; bundles are never changed in place
                shutil.copytree(public.path / source, target, copy_function=_link_or_copy)
    statement = privacy_statement(budget, settings.private)
    write_json(out / PRIVACY, statement)
    config = BundleConfig(
        kind="private",
        settings=settings,
        classes=classes,
        public=public.config.public,
        networks={
            "autoencoder": public.config.networks["autoencoder"],
            "denoiser": content_hash(out / "denoiser"),
            "encoder": public.config.networks["encoder"],
            "public_denoiser": public.config.networks["denoiser"],
        }
        | ({"probe": content_hash(out / "probe")} if budget.probe else {}),
    )
    (out / "README.md").write_text(private_card(config, statement), encoding="utf-8")
    write_config(out, config)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
