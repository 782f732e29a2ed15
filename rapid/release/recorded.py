"""A count of near-copies that an earlier report in the same folder made, and that this one uses again."""

from __future__ import annotations

from typing import Any

from rapid.dp.budget import Budget
from rapid.dp.ledger import Ledger
from rapid.errors import InputError
from rapid.files import content_hash, write_json
from rapid.parsing import parse_json
from rapid.release import nearness
from rapid.release.inputs import Inputs, Request
from rapid.training import Checkpoint, RunFolder

FIX = "or a new --out, which counts again and is charged for it"


def is_recorded(folder: RunFolder) -> bool:
    """Whether an earlier report in the folder has counted."""
    return folder.checkpoint(nearness.NAME).exists()


def note_request(folder: RunFolder, request: Request, inputs: Inputs) -> None:
    """Write what the count that follows is made for; public."""
    write_json(folder.checkpoint(nearness.NAME).with_suffix(".json"), _asked(request, inputs))


def check_request(folder: RunFolder, request: Request, inputs: Inputs) -> None:
    """Refuse a request to which a recorded count cannot belong, before images are drawn.

    Raises:
        InputError: the folder has a count for other synthetic images or with another epsilon.
    """
    if not is_recorded(folder) or inputs.private is None or inputs.public is None:
        return
    try:
        earlier = parse_json(folder.checkpoint(nearness.NAME).with_suffix(".json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # of an earlier version; `check_count` comes later
        return
    asked = _asked(request, inputs)
    if not isinstance(earlier, dict) or earlier.keys() != asked.keys():
        return
    for field, value in asked.items():
        if earlier[field] != value:
            was = f" ({earlier[field]})" if isinstance(earlier[field], int | float) else ""
            problem = f"differs from that of the near-copies in --out{was}"
            raise InputError(field, f"{problem}; give the same, {FIX}", getattr(request, field))


def check_count(folder: RunFolder, book: Ledger, dataset: str, spent: Budget) -> None:
    """Check a recorded count, if there is one: that the ledger was charged for it, and that it is the one asked for.

    Args:
        folder: of the report.
        book: the ledger.
        dataset: identifier of the private images.
        spent: budget of the count that is asked for.

    Raises:
        InputError: it was exchanged, or its run was killed before it settled, or it is of other synthetic images,
            another distance or another epsilon.
        TamperedLedger: see `Ledger`.
    """
    file = folder.checkpoint(nearness.NAME)
    if not file.exists():
        return
    known = {place.sha256 for entry in book.entries() if entry.dataset == dataset for place in entry.checkpoints}
    if content_hash(file) not in known:
        raise InputError("resume", f"{file} is not a count that the ledger knows; remove it to count again")
    state = Checkpoint(file).load() or {}
    if state.get("release") != spent.main.model_dump(mode="json"):
        same = "give the same --synthetic, --seed, --count, --public or --non-members, --epsilon, --policy and --device"
        problem = "the near-copies in --out are of other synthetic images, another distance or another epsilon"
        raise InputError("resume", f"{problem}; {same}, {FIX}")


def _asked(request: Request, inputs: Inputs) -> dict[str, Any]:
    """What a count is made for, by arguments; ready for JSON."""
    copies, given, drawn = request.policy.copies, inputs.synthetic, inputs.synthetic is None
    return {
        "synthetic": None if given is None else nearness.fingerprint(given),
        "seed": request.seed if drawn else None,
        "count": request.count or copies.min_synthetic if drawn else None,
        "epsilon": request.epsilon or copies.epsilon,
    }
