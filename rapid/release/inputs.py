"""What the gate decides about, read and checked before anything is written or spent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rapid.bundle import Bundle
from rapid.data import ImageSet, load_images
from rapid.data.classes import matched_labels
from rapid.data.private import PrivateImages
from rapid.data.units import ONE_PERSON, plural
from rapid.dp.ledger import default_path
from rapid.errors import InputError
from rapid.release import accounts, audits, membership, nearness
from rapid.release.policy import Policy
from rapid.rounding import as_typed
from rapid.training import RunFolder

Json = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What to decide about.

    Attributes:
        model: the private bundle.
        policy: what it must fulfil.
        out: folder of the report.
        private: the images that it was trained on; None leaves ledger and near-copies unmeasured.
        ledger: the ledger of `private`; default: `rapid.dp.ledger.default_path`.
        synthetic: images that the model made; None: they are drawn.
        count: number of images to draw; default: what the policy asks for.
        seed: of the drawn images.
        members: canaries that were in the private set, owned by the tester.
        non_members: canaries that were not.
        public: images like the private ones that are not private, which set the distance of near-copies; empty: those
            of `non_members`.
        audit: what `rapid audit --json` printed; None: an audit is run if the policy requires one.
        epsilon: of the count of near-copies; default: that of the policy.
    """

    model: Path
    policy: Policy
    out: Path
    private: PrivateImages | None = None
    ledger: Path | None = None
    synthetic: Path | None = None
    count: int | None = None
    seed: int = 0
    members: Path | None = None
    non_members: Path | None = None
    public: tuple[Path, ...] = ()
    audit: Path | None = None
    epsilon: float | None = None


@dataclass(frozen=True)
class Inputs:
    """Everything that was read and checked before anything is written or spent."""

    bundle: Bundle
    statement: accounts.Statement
    private: ImageSet | None
    """The private images in the form of the bundle, with digests of them as they are stored."""
    members: ImageSet | None
    non_members: ImageSet | None
    public: NDArray[np.uint8] | None
    synthetic: NDArray[np.uint8] | None
    audit: Json | None
    ledger: Path


def read_inputs(request: Request, *, resume: bool) -> Inputs:
    """Read and check everything.

    Args:
        request: what to decide about.
        resume: whether `request.out` may hold an earlier report.

    Raises:
        InputError: bad arguments or images.
    """
    policy = request.policy
    if request.epsilon is not None and not 0 < request.epsilon <= policy.copies.epsilon:
        most = as_typed(policy.copies.epsilon)
        raise InputError(
            "epsilon", f"must be positive and at most the policy's copies.epsilon, {most}", request.epsilon
        )
    if (request.members is None) != (request.non_members is None):
        missing = "members" if request.members is None else "non_members"
        raise InputError(missing, "attacks need both --members and --non-members")
    least = policy.copies.min_synthetic
    if request.count is not None and request.count < least:
        raise InputError("count", f"the policy wants at least {least:,} synthetic images", request.count)
    bundle = Bundle.open(request.model, "model", "private")
    if request.out.resolve().is_relative_to(bundle.path.resolve()):
        raise InputError("out", "lies in the bundle; give a folder outside", request.out)
    RunFolder(request.out).check(resume=resume)
    statement = accounts.Statement.of(bundle)
    audit = None if request.audit is None else audits.read_audit(request.audit, statement.noise_band)
    synthetic = None
    if request.synthetic is not None:
        synthetic = _open_images(request.synthetic, "synthetic", bundle).images
        if len(synthetic) < least:
            problem = f"has {len(synthetic):,} images; the policy wants at least {least:,}"
            raise InputError("synthetic", problem, request.synthetic)
    members, non_members = (
        None if path is None else _open_images(path, field, bundle)
        for path, field in ((request.members, "members"), (request.non_members, "non_members"))
    )
    if members is not None and non_members is not None and (members.labels is None) != (non_members.labels is None):
        # scores of the two would differ, because losses with and without a class do
        bare = "members" if members.labels is None else "non_members"
        problem = "has no labels, and the other set of canaries has; give labels to both, or to neither"
        raise InputError(bare, problem, request.members if bare == "members" else request.non_members)
    for field, canaries in (("members", members), ("non_members", non_members)):
        if canaries is not None:
            membership.check_number(field, len(canaries))
    public = [_open_images(path, "public", bundle, labelled=False).images for path in request.public]
    if not public and non_members is not None:
        public = [non_members.images]
    if public and request.private is not None:
        nearness.check_number(sum(map(len, public)), policy.copies.reference_share)
    return Inputs(
        bundle=bundle,
        statement=statement,
        private=None if request.private is None else _private(request.private, bundle, statement),
        members=members,
        non_members=non_members,
        public=np.concatenate(public) if public else None,
        synthetic=synthetic,
        audit=audit,
        ledger=request.ledger or default_path(),
    )


def _private(private: PrivateImages, bundle: Bundle, statement: accounts.Statement) -> ImageSet:
    """The private images; their number and unit must be those of the statement, which are public."""
    if (private.people is not None) != (statement.unit == ONE_PERSON):
        flags = "give --unit-column or --unit-folders" if private.people is None else "leave out --unit-column"
        raise InputError("private", f"the unit of the model is {statement.unit}; {flags}")
    found = private.load(bundle.config.image, digests=True)
    if found.unit_count != statement.dataset_size:
        counted = f"{plural(statement.unit)}, and the model was trained on {statement.dataset_size:,}"
        raise InputError("private", f"has {found.unit_count:,} {counted}; give the images that it was trained on")
    return found


def _open_images(path: Path, field: str, bundle: Bundle, *, labelled: bool = True) -> ImageSet:
    """Images that are not private, in the form of the bundle, with labels that are numbers of its classes."""
    found = load_images(path, field, target=bundle.config.image)
    if found.labels is None or not labelled or not bundle.classes:
        return replace(found, labels=None, classes=())
    labels = matched_labels(found, bundle.classes, field, "the model")
    return replace(found, labels=labels, classes=bundle.classes)
