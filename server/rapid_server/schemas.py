"""Bodies of requests and responses; an invalid request gets a message that names each wrong field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from rapid.parsing import problem_of

Request = TypeVar("Request", bound=BaseModel)

_INT64_END = 2**63
_SHOWN_ERRORS = 5
_LISTED_ERRORS = 1_000
_MAX_NAME = 255
"""Classes are often folders, and no file system has longer names."""


def _label(value: object) -> object:
    number = type(value) is int and -_INT64_END <= value < _INT64_END
    name = isinstance(value, str) and len(value) <= _MAX_NAME
    if not (number or name):
        raise ValueError("should be the name or the number of a class")
    return value


def _no_number(value: object) -> object:
    # 0 is equal to False
    if type(value) in (int, float):
        raise ValueError("should be False")
    return value


class Limits(BaseModel):
    """Limits of one request.

    Attributes:
        max_count: most images.
        max_steps: most sampling steps.
        image_bytes: bytes of pixels that count as one image; a larger image counts as several.
    """

    max_count: int
    max_steps: int
    image_bytes: int


class GenerateRequest(BaseModel):
    """The body of `POST /generate`."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"count": 4}, {"count": 2, "labels": [0, 1], "seed": 7}]},
    )

    count: Annotated[StrictInt, Field(ge=1, description="number of images")]
    labels: Annotated[
        list[Annotated[StrictInt | StrictStr, BeforeValidator(_label)]] | None,
        Field(description="class of each image, by name or number; null: all classes in turn"),
    ] = None
    seed: Annotated[
        Annotated[StrictInt, Field(ge=0, lt=_INT64_END)] | None,
        Field(description="equal requests with equal seeds get equal images; null: a random seed"),
    ] = None
    model: Annotated[
        Annotated[StrictStr, Field(max_length=_MAX_NAME)] | None,
        Field(description="a name that `GET /info` lists; null: the first"),
    ] = None
    steps: Annotated[
        Annotated[StrictInt, Field(ge=1)] | None,
        Field(description="sampling steps: more are slower, and up to a point better; null: the model's default"),
    ] = None
    soft_labels: Annotated[
        StrictBool,
        Field(description="also the probabilities of the classes by the model's probe; not as one PNG"),
    ] = False

    @field_validator("count", "steps")
    @classmethod
    def _at_most(cls, value: int | None, info: ValidationInfo) -> int | None:
        limit = getattr(info.context, f"max_{info.field_name}", None)
        if value is not None and limit is not None and value > limit:
            raise ValueError(f"should be at most {limit}")
        return value

    @field_validator("labels", mode="before")
    @classmethod
    def _not_too_many(cls, labels: object, info: ValidationInfo) -> object:
        # before validation: half a million errors take seconds, during which the server does nothing else
        limit = getattr(info.context, "max_count", None)
        if isinstance(labels, list) and limit is not None and len(labels) > limit:
            raise ValueError(f"should have at most {limit} entries")
        return labels

    @field_validator("labels")
    @classmethod
    def _one_for_each_image(cls, labels: list[int | str] | None, info: ValidationInfo) -> list[int | str] | None:
        count = info.data.get("count")
        if labels is not None and count is not None and len(labels) != count:
            raise ValueError(f"should have one entry for each image: count is {count}, entries are {len(labels)}")
        return labels


class PredictRequest(BaseModel):
    """The JSON body of `POST /predict`."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"images": ["iVBORw0KGgo..."]}]})

    images: Annotated[list[StrictStr], Field(min_length=1, description="PNG files in base64")]
    model: Annotated[
        Annotated[StrictStr, Field(max_length=_MAX_NAME)] | None,
        Field(description="a classifier that `GET /info` lists; null: the first"),
    ] = None

    @field_validator("images", mode="before")
    @classmethod
    def _not_too_many(cls, images: object, info: ValidationInfo) -> object:
        limit = getattr(info.context, "max_count", None)
        if isinstance(images, list) and limit is not None and len(images) > limit:
            raise ValueError(f"should have at most {limit} entries")
        return images


class PredictResponse(BaseModel):
    """The response of `POST /predict`."""

    labels: list[str] = Field(description="the most likely class of each image")
    probabilities: list[list[float]] = Field(description="of the classes, in the order of `classes`, for each image")
    classes: list[str]
    model: str
    privacy: dict[str, Any] | None = Field(description="epsilon, delta, ...; null for a model of public images alone")


class ImagesRequest(BaseModel):
    """The body of `POST /v1/images/generations`, in the form of the OpenAI API."""

    # clients send fields of other services, such as quality or user
    model_config = ConfigDict(extra="ignore", json_schema_extra={"examples": [{"prompt": "7", "n": 2}]})

    prompt: Annotated[
        StrictStr,
        Field(max_length=_MAX_NAME, description="class by name or number; empty or `any`: all classes in turn"),
    ] = ""
    n: Annotated[Annotated[StrictInt, Field(ge=1)] | None, Field(description="number of images")] = None
    model: Annotated[StrictStr, Field(max_length=_MAX_NAME)] | None = None
    size: Annotated[StrictStr | None, Field(max_length=40, description="WIDTHxHEIGHT of the model, or `auto`")] = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    stream: Annotated[
        Literal[False] | None, BeforeValidator(_no_number), Field(description="use `POST /generate` for streams")
    ] = None
    seed: Annotated[StrictInt, Field(ge=0, lt=_INT64_END)] | None = None

    @field_validator("n")
    @classmethod
    def _at_most(cls, value: int | None, info: ValidationInfo) -> int | None:
        limit = getattr(info.context, "max_count", None)
        if value is not None and limit is not None and value > limit:
            raise ValueError(f"should be at most {limit}")
        return value


class OneImage(BaseModel):
    """An image of `ImagesResponse`."""

    b64_json: str = Field(description="a PNG file in base64")
    revised_prompt: str | None = Field(description="class of the image")


class ImagesResponse(BaseModel):
    """The response of `POST /v1/images/generations`."""

    created: int = Field(description="seconds since 1970")
    data: list[OneImage]
    output_format: Literal["png"] = "png"
    size: str
    model: str
    seed: int = Field(ge=0, lt=_INT64_END, description="use it again to get the same images")
    privacy: dict[str, Any] | None


class OpenAIModel(BaseModel):
    """A model, as the OpenAI API describes it, with what a request needs to know."""

    id: str
    object: Literal["model"] = "model"
    created: int = Field(description="seconds since 1970")
    owned_by: str = "rapid"
    classes: list[str] = Field(description="what `prompt` can be; empty if the model has no classes")
    size: str = Field(description="WIDTHxHEIGHT of the images")


class OpenAIModels(BaseModel):
    """The response of `GET /v1/models`."""

    object: Literal["list"] = "list"
    data: list[OpenAIModel]


class GenerateResponse(BaseModel):
    """The JSON response of `POST /generate`."""

    images: list[str] = Field(description="PNG files in base64")
    labels: list[str | None] = Field(description="class of each image; null if the model has no classes")
    entries: list[int | None] = Field(
        description="knowledge base record that each image started from, for `GET /entries/{entry}`; null: noise alone"
    )
    soft_labels: list[list[float]] | None = Field(
        description="probabilities of the classes, in the order of `GET /info`, for each image; null: not asked for"
    )
    seed: int = Field(ge=0, lt=_INT64_END, description="use it again to get the same images")
    model: str
    privacy: dict[str, Any] | None = Field(description="epsilon, delta, ...; null for a model of public images alone")


class ModelInfo(BaseModel):
    """A model that is served."""

    model: str
    classes: list[str] = Field(description="in the order of their numbers; empty if the model has no classes")
    image_shape: list[int] = Field(description="height, width, and 3 for colour")
    task: Literal["generation", "classification"] = Field(description="what the model does")
    max_count: int = Field(description="most images in one request")
    steps: int = Field(description="sampling steps of a request that names none; 0 for a classifier")
    max_steps: int = Field(description="most steps in one request; 0 for a classifier")
    privacy: dict[str, Any] | None = Field(description="epsilon, delta, ...; null for a model of public images alone")
    privacy_in_words: str
    sha256: str = Field(description="digest of the bundle, also in each PNG")
    bundle: dict[str, Any] = Field(description="output of `rapid info`")


class Info(ModelInfo):
    """The response of `GET /info`: the default model, which is the first, and all models."""

    max_count: int = Field(description="most images in one request, of any model; one of larger images may have less")
    max_steps: int = Field(description="most steps in one request, of any model; a model may have less")
    models: list[ModelInfo]


class Status(BaseModel):
    """The response of `GET /healthz` and `GET /readyz`."""

    status: str


class Problem(BaseModel):
    """The body of every error outside of `/v1`."""

    detail: str = Field(description="what is wrong")


class OpenAIError(BaseModel):
    """What is wrong, in the form of the OpenAI API."""

    message: str
    type: str = Field(description="invalid_request_error, rate_limit_error or server_error")
    code: str | None
    param: str | None = Field(description="the field of the request that is to blame")


class OpenAIProblem(BaseModel):
    """The body of every error under `/v1`."""

    error: OpenAIError


class InvalidRequest(ValueError):
    """A request that does not fit its schema; the message names each wrong field, `field` is the first."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


def parse_request(kind: type[Request], body: bytes, limits: Limits) -> Request:
    """Parse a request.

    Raises:
        InvalidRequest: it does not fit.
    """
    try:
        return kind.model_validate_json(body, context=limits)
    except ValidationError as error:
        if error.error_count() > _LISTED_ERRORS:
            # listing them takes longer than all else, in the event loop
            problem = f"{error.error_count():,} of its fields or values are wrong; /docs has those that there are"
            raise InvalidRequest(f"body: {problem}", "body") from None
        errors = error.errors(include_url=False, include_input=False)
        raise InvalidRequest(_describe(kind, errors), _field(errors[0])) from None


def request_schema(kind: type[BaseModel], limits: Limits) -> dict[str, Any]:
    """JSON schema of a request, with the limits of this server."""
    schema = kind.model_json_schema()
    for name, key in (("count", "max_count"), ("n", "max_count"), ("steps", "max_steps")):
        field = schema["properties"].get(name)
        for choice in [] if field is None else field.get("anyOf", [field]):
            if choice.get("type") == "integer":
                choice["maximum"] = getattr(limits, key)
    return schema


def predict_schema(limits: Limits) -> dict[str, Any]:
    """JSON schema of a `PredictRequest`, with the limits of this server."""
    schema = PredictRequest.model_json_schema()
    schema["properties"]["images"]["maxItems"] = limits.max_count
    return schema


def _describe(kind: type[BaseModel], errors: Sequence[ErrorDetails]) -> str:
    problems = [f"{_field(error)}: {_message(kind, error)}" for error in errors[:_SHOWN_ERRORS]]
    if len(errors) > _SHOWN_ERRORS:
        problems.append(f"and {len(errors) - _SHOWN_ERRORS} more")
    return "; ".join(problems)


def _field(error: ErrorDetails) -> str:
    name, *rest = error["loc"] or ("body",)
    shown = str(name)[:80]
    return f"{shown}[{rest[0]}]" if rest and isinstance(rest[0], int) else shown


def _message(kind: type[BaseModel], error: ErrorDetails) -> str:
    match error["type"]:
        case "missing":
            return "is missing"
        case "extra_forbidden":
            return "is not a known field; known are " + ", ".join(kind.model_fields)
        case "model_type":
            return "should be a JSON object"
        case "json_invalid":
            return "is not JSON" + error["msg"].removeprefix("Invalid JSON")
        case _:
            return problem_of(error, "should")
