"""The settings of `rapid serve`: command-line flags, else the environment, else a settings file, else the defaults.

A setting has the same name everywhere: `--max-count`, `RAPID_SERVE_MAX_COUNT`, `max_count:` in the file. A list in the
environment is separated by commas, or JSON. An empty variable counts as not set. An unknown setting is an error.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from rapid.errors import InputError
from rapid.parsing import parse_yaml, problem_of
from rapid_server.setting_types import check_host, check_origin, is_loopback, split_list, split_model, split_token

PREFIX = "RAPID_SERVE_"
UNFLAGGED = (
    "tokens", "max_steps", "image_bytes", "max_body_bytes", "max_bodies_bytes", "max_connections", "grace_seconds",
)  # fmt: skip
"""Settings without a flag: for the environment and the settings file only."""
SINGULAR = {"cors_origins": "cors_origin", "allowed_hosts": "allowed_host"}
"""Flags of lists that are given once for each entry."""
_T = TypeVar("_T")
Origin = Literal["flag", "environment", "file", "default"]

_KEY = re.compile(r"[A-Za-z0-9_]{1,40}")
"""Unknown keys that a message may quote: tokens and hashes are longer."""


def _checked(split: Callable[[_T], object]) -> Callable[[_T], _T]:
    """A validator that returns the entry itself if `split` accepts it."""

    def check(entry: _T) -> _T:
        split(entry)
        return entry

    return check


class ServerSettings(BaseSettings):
    """Settings of a server. `load` reads them from all sources; the constructor uses its arguments only."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=PREFIX, env_ignore_empty=True, hide_input_in_errors=True
    )

    model: Annotated[
        tuple[Annotated[str, AfterValidator(_checked(split_model))], ...],
        NoDecode,
        BeforeValidator(split_list),
        Field(description="bundles, each as DIR or NAME=DIR; the default name is that of the folder; the first "
              "bundle serves requests that name none"),
    ]  # fmt: skip
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535, description="0: any free port")
    device: str = Field("auto", description="auto, cpu or cuda")
    tokens: Annotated[
        tuple[Annotated[SecretStr, AfterValidator(_checked(split_token))], ...],
        NoDecode,
        BeforeValidator(split_list),
        Field(description="NAME:HASH, as `rapid token NAME` prints it; with any of them, requests need a token"),
    ] = ()
    open: bool = Field(False, description="serve other machines without tokens")
    cors_origins: Annotated[
        tuple[Annotated[str, AfterValidator(check_origin)], ...],
        NoDecode,
        BeforeValidator(split_list),
        Field(description="other origins whose pages may send requests, such as https://example.org"),
    ] = ()
    allowed_hosts: Annotated[
        tuple[Annotated[str, AfterValidator(check_host)], ...],
        NoDecode,
        BeforeValidator(split_list),
        Field(
            description="names by which others ask a server that has no tokens and listens on this machine only, "
            "such as the name of a proxy before it; *: any"
        ),
    ] = ()
    max_count: int = Field(10_000, ge=1, description="most images in one request")
    max_steps: int = Field(200, ge=1, description="most sampling steps in one request")
    max_queued: int = Field(50_000, ge=1, description="most images that are queued or being made; beyond: 503")
    max_client: int = Field(20_000, ge=1, description="most of these of one client; beyond: 429")
    image_bytes: int = Field(
        64 * 64 * 3, ge=1, description="bytes of pixels that count as one image in max_count, max_queued and "
        "max_client; a larger image counts as several"
    )  # fmt: skip
    max_body_bytes: int = Field(1 << 20, ge=1, description="most bytes of a request's body; beyond: 413")
    max_bodies_bytes: int = Field(
        1 << 28, ge=1, description="most bytes of all bodies until their responses have left; beyond: 503, or 429 "
        "beyond half of it for one client"
    )  # fmt: skip
    max_connections: int = Field(2048, ge=1, description="beyond: 503")
    grace_seconds: float = Field(7.0, ge=0, le=3600, allow_inf_nan=False, description="for running requests")
    log_format: Literal["text", "json"] = "text"
    batch: int | None = Field(None, ge=1, description="most rows of a step; none: measured at the start")

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Leave the sources to `load`, which keeps track of the origin of each setting."""
        return (init_settings,)

    @field_validator("model")
    @classmethod
    def _names(cls, entries: tuple[str, ...]) -> tuple[str, ...]:
        if not entries:
            raise ValueError("give the folder of a bundle")
        names = [split_model(entry)[0] for entry in entries]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two bundles are named {min(twice)}; write NAME=DIR")
        return entries

    @field_validator("tokens")
    @classmethod
    def _hashes(cls, entries: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        hashes = [split_token(entry)[1] for entry in entries]
        if len(set(hashes)) < len(hashes):
            raise ValueError("one token is given twice; each client has its own, from `rapid token NAME`")
        return entries

    @model_validator(mode="after")
    def _together(self) -> Self:
        if self.open and self.tokens:
            raise _conflict("open", "with tokens, every request needs one; remove one of the two settings")
        if not (self.open or self.tokens or is_loopback(self.host)):
            raise _conflict(
                "host",
                "would serve anyone who reaches it: make a token with `rapid token NAME` and put its line into tokens "
                f"({PREFIX}TOKENS, or a --settings file), or use --open",
            )
        for name, limit in (("max_client", self.max_client), ("max_queued", self.max_queued)):
            if self.max_count > limit:
                raise _conflict("max_count", f"is more than {name} ({limit}): such a request could never be served")
        if self.max_bodies_bytes < 2 * self.max_body_bytes:
            raise _conflict("max_bodies_bytes", f"is less than twice max_body_bytes ({self.max_body_bytes}): raise it")
        return self

    @property
    def only_local(self) -> bool:
        """Whether it serves this machine alone, without tokens; then `host` is a loopback address."""
        return not (self.open or self.tokens)

    @property
    def models(self) -> dict[str, Path]:
        """The folder of each bundle by its name, in the given order."""
        return dict(map(split_model, self.model))

    def shown(self) -> str:
        """One line per setting, with its origin. Of a token only the client's name is shown."""
        lines = []
        for name, value in self:
            shown = [f"{split_token(entry)[0]}: set" for entry in value] if name == "tokens" else value
            lines.append(f"{name}: {json.dumps(shown, ensure_ascii=False)} ({self._origins.get(name, 'default')})")
        return "\n".join(lines)


def load(flags: Mapping[str, object], environ: Mapping[str, str]) -> ServerSettings:
    """Read the settings from all sources.

    Args:
        flags: values by the names of the settings, and `settings` for the settings file; None means not given.
        environ: the environment.

    Raises:
        InputError: a setting is unknown or invalid; the message names the flag, variable or key, and the fix. It never
            contains any part of a token.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    flagged = given.pop("settings", None)
    variable = f"{PREFIX}SETTINGS"
    path = flagged or environ.get(variable)
    field, prefix = ("settings", "") if flagged else ("", f"{variable} ")
    variables = [variable, *(PREFIX + name.upper() for name in ServerSettings.model_fields)]
    _check_known((name for name in environ if name.startswith(PREFIX)), variables, "")
    found: list[tuple[Origin, Mapping[str, Any]]] = [
        ("file", _from_file(Path(str(path)), field, prefix) if path else {}),
        ("environment", _from_environment(environ)),
        ("flag", given),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, Origin] = {}
    for origin, settings in found:
        values |= settings
        origins |= dict.fromkeys(settings, origin)
    try:
        loaded = ServerSettings(**values)
    except ValidationError as error:
        raise _input_error(error.errors(include_url=False)[0], values, origins, str(path)) from None
    loaded._origins = origins
    return loaded


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    source = EnvSettingsSource(ServerSettings)
    source.env_vars = {name.lower(): value for name, value in environ.items() if value and name.startswith(PREFIX)}
    return source()


def _from_file(path: Path, field: str, prefix: str) -> dict[str, Any]:
    """Read the settings file; `field` and `prefix` say in messages where its path came from."""
    shown = f"{prefix}{path}"
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(field, f"cannot be read ({error.strerror})", shown) from None
    except (yaml.YAMLError, ValueError) as error:
        # without the parser's message: it quotes the file, which may hold tokens
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise InputError(field, "is not YAML in UTF-8, or has a name twice", f"{shown}{where}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise InputError(field, "should have lines such as `port: 8000`", shown)
    _check_known(map(str, tree), ServerSettings.model_fields, f"{path}: ")
    return {name: value for name, value in tree.items() if value is not None}


def _check_known(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise InputError for an unknown name."""
    known = list(known)
    for name in names:
        if name not in known:
            shown = name if _KEY.fullmatch(name) else "a key that is not shown"
            raise InputError("", f"{where}{shown}: is not a setting; known are {', '.join(known)}")


def _conflict(name: str, problem: str) -> PydanticCustomError:
    """An error for settings that contradict each other, reported for one of them."""
    return PydanticCustomError("conflict", "{problem}", {"setting": name, "problem": problem})


def _input_error(
    error: ErrorDetails, values: Mapping[str, Any], origins: Mapping[str, Origin], path: str
) -> InputError:
    """The InputError for one of pydantic's errors; it names the flag, the variable, or the key of the file."""
    name, *rest = error["loc"] or (error.get("ctx", {})["setting"],)
    name = str(name)
    index = rest[0] if rest and isinstance(rest[0], int) else None
    value = values.get(name)
    if name == "tokens":
        value = None if index is None else f"entry {index + 1}"
    elif index is not None:
        entries = split_list(value)
        value = entries[index] if isinstance(entries, list | tuple) else value
    shown = None if value is None else textwrap.shorten(str(value), 100, placeholder=" ...")
    origin = origins.get(name, "default")
    if origin == "file":
        where = f"{path}: {name}"
    elif origin == "environment" or name in UNFLAGGED:
        where = PREFIX + name.upper()
    else:
        return InputError(SINGULAR.get(name, name), _problem(error), shown)
    return InputError("", _problem(error), where if shown is None else f"{where} {shown}")


def _problem(error: ErrorDetails) -> str:
    if error["type"] == "missing":
        return f"is missing; give the folder of a bundle, here, as {PREFIX}MODEL or as model in a --settings file"
    return problem_of(error, "should")
