"""The manifest: what a knowledge base holds, which networks made it, and the hashes of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator

from .errors import CorruptKnowledgeBase, KnowledgeBaseError

FORMAT: Final = 1
MANIFEST, KEYS, VALUES, LABELS = "manifest.json", "keys.faiss", "values.npy", "labels.npy"

IndexType = Literal["flat", "hnsw", "ivf"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, Field(min_length=1)]


class Layout(BaseModel):
    """The part of a manifest that is known before the first record is written.

    Attributes:
        format: version of the layout on disk.
        key_dim: length d of a key.
        value_shape: shape of one value, for example (4, 8, 8); the empty tuple for scalars.
        value_dtype: dtype of the values on disk.
        metric: how keys are compared; distances are squared l2.
        index_type: ``flat`` is exact; ``hnsw`` (graph) and ``ivf`` (clusters) are faster and approximate.
        k: diffusion step of the keys.
        v: diffusion step of the values, 1 <= v < k.
        timesteps: length T of the diffusion, k <= T.
        networks: sha256 (hex) of each network that contributed to the keys and values, by name.

    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = FORMAT
    key_dim: PositiveInt
    value_shape: tuple[PositiveInt, ...]
    value_dtype: Literal["float32"] = "float32"
    metric: Literal["l2"] = "l2"
    index_type: IndexType = "flat"
    k: int
    v: int
    timesteps: int
    networks: dict[Name, Sha256]

    @model_validator(mode="after")
    def _steps_in_order(self) -> Self:
        if not 1 <= self.v < self.k <= self.timesteps:
            raise ValueError(
                f"1 <= v < k <= timesteps does not hold: v={self.v}, k={self.k}, timesteps={self.timesteps}"
            )
        return self


class Manifest(Layout):
    """Manifest of a finished knowledge base; frozen, unknown fields are rejected.

    Attributes:
        size: number of records, at least 1.
        files: sha256 (hex) of every file beside the manifest, by name.
        sizes: length of the same files in bytes.

    """

    size: PositiveInt
    files: dict[str, Sha256]
    sizes: dict[str, PositiveInt]

    @model_validator(mode="after")
    def _names_every_file(self) -> Self:
        for field in ("files", "sizes"):
            if set(getattr(self, field)) != {KEYS, VALUES, LABELS}:
                raise ValueError(f"{field} must name {KEYS}, {VALUES} and {LABELS}")
        return self

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of the knowledge base in ``folder``; no other file is touched.

        Raises:
            CorruptKnowledgeBase: the manifest is missing or invalid.
            KnowledgeBaseError: it has a format that this version does not know.

        """
        path = folder / MANIFEST
        try:
            return cls.model_validate_json(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise CorruptKnowledgeBase(
                f"{folder}: no knowledge base here ({MANIFEST} is missing): give the right folder or build it"
            ) from None
        except ValidationError as error:
            for problem in error.errors():
                if problem["loc"] == ("format",) and isinstance(problem["input"], int):
                    raise KnowledgeBaseError(
                        f"{path}: has format {problem['input']}, this version reads format {FORMAT}: "
                        "use the version that wrote it, or build it again"
                    ) from None
            raise CorruptKnowledgeBase(f"{path}: not a manifest ({explain(error)}): build it again") from None


def explain(error: ValidationError) -> str:
    """One line for a pydantic error: ``field: message; field: message``."""
    lines = []
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        message = " ".join(problem["msg"].removeprefix("Value error, ").split())
        lines.append(f"{where}: {message}" if where else message)
    return "; ".join(lines)
