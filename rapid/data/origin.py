"""The private models behind generated images, as the images themselves tell them.

What `rapid generate` writes carries the text of `rapid.bundle.info.provenance`: PNG files in a text chunk, an `.npz` in
an array. Images of a private model have its guarantee and no more, so what is made of them has to say so, too. The text
is a help for those who keep to it, not a proof: images that were converted since may have lost it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rapid.errors import printable
from rapid.rounding import rounded_up

KEYWORD = "rapid"
"""Of the text chunk and of the array."""
MADE_FROM = "made_from"
"""Key of the private models behind the base of a model."""
LONGEST = 200


def _shown(text: str) -> str:
    """What can stand in a line of a terminal or a card; another program may have written it."""
    return printable(text[:LONGEST])


Words = Annotated[str, AfterValidator(_shown)]


class Origin(BaseModel):
    """A private model that made images.

    Attributes:
        model: name of its folder.
        sha256: digest of its bundle.
        method: its method; empty in images that earlier versions wrote.
        epsilon: of its guarantee.
        delta: of its guarantee.
        adjacency: what is added or removed, such as "add or remove one image"; it names the unit.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    model: Words
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    method: Words = ""
    epsilon: float = Field(gt=0, allow_inf_nan=False)
    delta: float = Field(ge=0, lt=1)
    adjacency: Words = ""

    def __str__(self) -> str:
        numbers = f"epsilon {rounded_up(self.epsilon)}, delta {rounded_up(self.delta)}"
        return f"'{self.model}' ({', '.join(filter(None, (self.method, numbers, self.adjacency)))})"


@lru_cache(maxsize=16)
def origins_in(text: str) -> tuple[Origin, ...]:
    """The private models that a text of `provenance` names: the one that made the images, and those behind its base.

    Args:
        text: JSON; none are named in one that is something else, because any program may use the keyword.
    """
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return ()
    if not isinstance(content, dict):
        return ()
    behind = content.get(MADE_FROM)
    found = []
    for one in (content, *(behind if isinstance(behind, list) else ())):
        try:
            found.append(Origin.model_validate(one))
        except ValidationError:
            # a public model has no guarantee
            continue
    return union(found)


def union(*groups: Sequence[Origin]) -> tuple[Origin, ...]:
    """All origins of several groups, each once, in their order."""
    return tuple(dict.fromkeys(one for group in groups for one in group))


def listed(origins: Sequence[Origin]) -> str:
    """At least one origin, as "the private model 'a' (...)" or "the private models 'a' (...) and 'b' (...)"."""
    return f"the private model{'s' if len(origins) > 1 else ''} {' and '.join(map(str, origins))}"
