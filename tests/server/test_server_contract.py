"""The OpenAPI description against the server, over a real socket: what it says is so, and nothing else happens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rapid_server.auth import OPEN_PATHS, hash_token, new_token
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

TOKEN = new_token()
ACCEPT = [
    "*/*",
    "application/json",
    "image/png",
    "application/zip",
    "application/x-ndjson",
    "text/event-stream",
    "text/html",
    "image/*;q=0.5, application/zip;q=0.1",
]
# not that all that the schema permits is accepted: how many labels and which classes fit, it cannot say
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]
OPERATIONS = [
    ("POST", "/generate"),
    ("POST", "/predict"),
    ("POST", "/v1/images/generations"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/entries/{entry}"),
    ("GET", "/info"),
    ("GET", "/healthz"),
    ("GET", "/readyz"),
    ("GET", "/metrics"),
]
# no parameters and no body that could be wrong, or a name, which may be any text
ANYTHING_FITS = ("/healthz", "/readyz", "/info", "/metrics", "/v1/models", "/v1/models/{model}")
few = settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


def describe(client: httpx.Client) -> Any:
    return schemathesis.openapi.from_url(
        str(client.base_url.join("/openapi.json")), config=SchemathesisConfig(seed=1, color=False)
    )


@pytest.fixture(scope="module")
def described(application: Any, serving: Any) -> Iterator[Any]:
    with serving(application(max_count=3, max_steps=40)) as client:
        yield describe(client)


@pytest.fixture(scope="module")
def guarded(application: Any, serving: Any) -> Iterator[Any]:
    """The same with a token."""
    with serving(application(max_count=3, max_steps=40, tokens=(f"alice:{hash_token(TOKEN)}",))) as client:
        yield describe(client)


def test_these_are_all(described: Any) -> None:
    found = {(one.ok().method.upper(), one.ok().path) for one in described.get_all_operations()}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@few
@given(data=st.data())
def test_the_description_is_true(described: Any, data: st.DataObject, method: str, path: str, mode: Any) -> None:
    case = draw(data, described, method, path, mode)
    accept = data.draw(st.sampled_from(ACCEPT))
    case.call_and_validate(headers={"Accept": accept}, checks=CHECKS, timeout=60)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
@settings(few, max_examples=9)
@given(data=st.data(), sent=st.sampled_from([None, TOKEN, new_token()]))
def test_the_description_is_true_with_tokens(
    guarded: Any, data: st.DataObject, sent: str | None, method: str, path: str
) -> None:
    case = draw(data, guarded, method, path, GenerationMode.POSITIVE)
    response = case.call(headers={} if sent is None else {"Authorization": f"Bearer {sent}"}, timeout=60)
    case.validate_response(response, checks=CHECKS)
    if path not in OPEN_PATHS:
        assert (response.status_code == 401) == (sent != TOKEN)


def draw(data: st.DataObject, described: Any, method: str, path: str, mode: Any) -> Any:
    """A request as the description has it, or one that differs from it where that is possible."""
    operation = described[path][method]
    if mode is GenerationMode.NEGATIVE and path in ANYTHING_FITS:
        mode = GenerationMode.POSITIVE
    return data.draw(operation.as_strategy(generation_mode=mode))


def test_each_form_of_answer_is_as_described(described: Any) -> None:
    """Those that the draws above may miss."""
    operation = described["/generate"]["POST"]
    for accept in ACCEPT:
        case = operation.Case(body={"count": 2, "seed": 1}, media_type="application/json")
        response = case.call(headers={"Accept": accept}, timeout=60)
        assert response.status_code == (406 if accept == "text/html" else 200)
        case.validate_response(response, checks=CHECKS)
    for path, body in (("/v1/images/generations", {"prompt": "7", "n": 3}), ("/v1/images/generations", {})):
        case = described[path]["POST"].Case(body=body, media_type="application/json")
        assert case.call_and_validate(checks=CHECKS, timeout=60).status_code == 200
    case = described["/entries/{entry}"]["GET"].Case(path_parameters={"entry": 0})
    assert case.call_and_validate(checks=CHECKS, timeout=60).status_code == 200
