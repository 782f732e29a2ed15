"""The body of an error: `{"detail": ...}`, and under `/v1` the form that clients of the OpenAI API read.

Those look for `{"error": {"message", "type", "code", "param"}}`, and show the user nothing of any other body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Scope

from rapid_server.schemas import OpenAIProblem, Problem

FAILED = "internal error"
STOPPING = "the server is stopping"
OPENAI_PREFIX = "/v1"
REQUEST, RATE, SERVER = "invalid_request_error", "rate_limit_error", "server_error"
KINDS = {
    401: (REQUEST, "invalid_api_key"),
    404: (REQUEST, "not_found"),
    405: (REQUEST, "method_not_allowed"),
    408: (REQUEST, "request_timeout"),
    413: (REQUEST, "request_too_large"),
    421: (REQUEST, "misdirected_request"),
    422: (REQUEST, "invalid_value"),
    429: (RATE, "rate_limit_exceeded"),
    500: (SERVER, "internal_error"),
    503: (SERVER, "service_unavailable"),
}
"""`type` and `code` of each status."""


class Refusal(HTTPException):
    """An error that names the field of the request that is to blame.

    Args:
        status: of the response.
        detail: what is wrong.
        param: the field, if there is one; only the form of the OpenAI API shows it by itself.
        code: in that form; default: that of the status.
    """

    def __init__(self, status: int, detail: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, detail)
        self.param = param
        self.code = code


def has_openai_form(scope: Scope) -> bool:
    """Whether the path lies under `/v1`."""
    return f"{scope['path']}/".startswith(f"{OPENAI_PREFIX}/")


def problem_response(
    scope: Scope,
    status: int,
    detail: str,
    headers: Mapping[str, str] | None = None,
    *,
    param: str | None = None,
    code: str | None = None,
) -> JSONResponse:
    """An error response in the form of the request's path.

    Args:
        scope: of the request.
        status: 400..599.
        detail: what is wrong.
        headers: of the response.
        param: the field to blame.
        code: default: that of the status.
    """
    if not has_openai_form(scope):
        return JSONResponse({"detail": detail}, status, headers)
    kind, usual = KINDS.get(status, (REQUEST if status < 500 else SERVER, None))
    error = {"message": detail, "type": kind, "code": code or usual, "param": param}
    return JSONResponse({"error": error}, status, headers)


def problems(statuses: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """Error statuses of an endpoint, for the OpenAPI description."""
    return {status: {"model": Problem, "description": description} for status, description in statuses.items()}


def openai_problems(statuses: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """The same for an endpoint under `/v1`."""
    return {status: {"model": OpenAIProblem, "description": description} for status, description in statuses.items()}
