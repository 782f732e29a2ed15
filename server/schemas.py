"""What a client asks and what it gets. A request that is refused is refused in words that name the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

_INT64_END = 2**63
_SHOWN_ERRORS = 5
_LONGEST_NAME = 255  # a class can be a folder; no system has longer names


def _label(value: object) -> object:
    number = type(value) is int and -_INT64_END <= value < _INT64_END
    name = isinstance(value, str) and len(value) <= _LONGEST_NAME
    if not (number or name):
        raise ValueError("should be the name or the number of a class")
    return value


class GenerateRequest(BaseModel):
    """The body of `POST /generate`."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"count": 4}, {"count": 2, "labels": [0, 1], "seed": 7}]},
    )

    count: Annotated[StrictInt, Field(ge=1, description="how many images to make")]
    labels: Annotated[
        list[Annotated[StrictInt | StrictStr, BeforeValidator(_label)]] | None,
        Field(description="the class of each image, by name or by number; null: all classes in turn"),
    ] = None
    seed: Annotated[
        Annotated[StrictInt, Field(ge=0, lt=_INT64_END)] | None,
        Field(description="the same request with the same seed has the same answer; null: a fresh one"),
    ] = None

    @field_validator("count")
    @classmethod
    def _at_most(cls, count: int, info: ValidationInfo) -> int:
        limit = (info.context or {}).get("max_count")
        if limit is not None and count > limit:
            raise ValueError(f"should be at most {limit}")
        return count

    @field_validator("labels")
    @classmethod
    def _one_for_each_image(cls, labels: list[int | str] | None, info: ValidationInfo) -> list[int | str] | None:
        count = info.data.get("count")
        if labels is not None and count is not None and len(labels) != count:
            raise ValueError(f"should have one entry for each image: count is {count}, entries are {len(labels)}")
        return labels


class GenerateResponse(BaseModel):
    """The JSON answer of `POST /generate`."""

    images: list[str] = Field(description="PNG files in base64")
    labels: list[str | None] = Field(description="the class of each image; null where the model has no classes")
    seed: int = Field(ge=0, lt=_INT64_END, description="ask with this seed to get the same images again")
    model: str
    privacy: dict[str, Any] | None = Field(description="epsilon, delta, ...; null for a model of public images only")


class Info(BaseModel):
    """The answer of `GET /info`."""

    model: str
    classes: list[str] = Field(description="in the order of their numbers; empty where the model has no classes")
    image_shape: list[int] = Field(description="height, width, and 3 if in colour")
    max_count: int = Field(description="the most images in one request")
    privacy: dict[str, Any] | None = Field(description="epsilon, delta, ...; null for a model of public images only")
    bundle: dict[str, Any] = Field(description="what `rapid info` shows")


class Status(BaseModel):
    """The answer of `GET /healthz` and `GET /readyz`."""

    status: str


class Problem(BaseModel):
    """Every error."""

    detail: str = Field(description="what is wrong, in words")


def parse_request(body: bytes, max_count: int) -> GenerateRequest:
    """Read a request from JSON. Raises ValueError whose message names each field that is wrong."""
    try:
        return GenerateRequest.model_validate_json(body, context={"max_count": max_count})
    except ValidationError as error:
        raise ValueError(_in_words(error.errors(include_url=False, include_input=False))) from None


def request_schema(max_count: int) -> dict[str, Any]:
    """JSON schema of a request to a server that makes at most `max_count` images at once."""
    schema = GenerateRequest.model_json_schema()
    schema["properties"]["count"]["maximum"] = max_count
    return schema


def _in_words(errors: Sequence[ErrorDetails]) -> str:
    words = [f"{_field(error)}: {_message(error)}" for error in errors[:_SHOWN_ERRORS]]
    if len(errors) > _SHOWN_ERRORS:
        words.append(f"and {len(errors) - _SHOWN_ERRORS} more")
    return "; ".join(words)


def _field(error: ErrorDetails) -> str:
    name, *rest = error["loc"] or ("body",)
    shown = str(name)[:80]
    return f"{shown}[{rest[0]}]" if rest and isinstance(rest[0], int) else shown


def _message(error: ErrorDetails) -> str:
    match error["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return "is not a known field; known are " + ", ".join(GenerateRequest.model_fields)
        case "model_type":
            return "should be a JSON object"
        case "json_invalid":
            return "is not JSON" + error["msg"].removeprefix("Invalid JSON")
        case _:
            return error["msg"].removeprefix("Input ").removeprefix("Value error, ")
