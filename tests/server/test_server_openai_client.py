"""The official OpenAI client against `/v1`, over a real socket: models, images, and refusals that say why."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from PIL import Image
from rapid_server.auth import hash_token, new_token
from tests_support import assert_same_images

from rapid.sampling.generate import generate
from rapid.sampling.generator import Generator

TOKEN = new_token()


def connect(client: httpx.Client, token: str = "none") -> openai.OpenAI:
    """The official client of the server that `client` speaks to; it tries nothing twice."""
    return openai.OpenAI(base_url=str(client.base_url.join("/v1")), api_key=token, max_retries=0)


@pytest.fixture(scope="module")
def api(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with connect(client) as found:
        yield found


def test_models(api: openai.OpenAI, generator: Generator) -> None:
    name = generator.bundle.name
    (listed,) = api.models.list()
    assert listed == api.models.retrieve(name)
    assert (listed.id, listed.object, listed.owned_by) == (name, "model", "rapid")
    assert listed.created == int((generator.bundle.path / "config.json").stat().st_mtime)
    assert listed.model_extra == {"classes": list("0123456789"), "size": "32x32"}


def test_images(api: openai.OpenAI, generator: Generator) -> None:
    answer = api.images.generate(
        prompt="7", n=2, model=generator.bundle.name, size="auto", response_format="b64_json",
        output_format="png", quality="high", user="me", extra_body={"seed": 4},
    )  # fmt: skip
    assert answer.data is not None
    expected = generate(generator, 2, [7, 7], 4).images
    for one, image in zip(answer.data, expected, strict=True):
        assert (one.revised_prompt, one.url) == ("7", None)
        with Image.open(io.BytesIO(base64.b64decode(one.b64_json or "", validate=True))) as png:
            assert_same_images(png, image)
    assert (answer.size, answer.output_format) == ("32x32", "png")
    assert api.images.generate(prompt="any", n=3, size="32x32").data is not None


@pytest.mark.parametrize(
    ("arguments", "param", "words"),
    [
        ({"prompt": "a cat"}, "prompt", "unknown; the model knows 0, 1, 2"),
        ({"prompt": "7", "n": 301}, "n", "n: should be at most 300"),
        ({"prompt": "7", "n": 0}, "n", "n: should be at least"),
        ({"prompt": "7", "size": "1024x1024"}, "size", "are 32x32; ask for that, or for auto"),
        ({"prompt": "7", "response_format": "url"}, "response_format", "'b64_json'"),
        ({"prompt": "7", "output_format": "jpeg"}, "output_format", "'png'"),
        ({"prompt": "7", "extra_body": {"stream": True}}, "stream", "stream: should be False"),
        ({"prompt": "7", "extra_body": {"seed": -1, "n": 0}}, "n", "seed: should be"),
        ({"prompt": "x" * 256}, "prompt", "at most 255 characters"),
    ],
)
def test_a_refusal_says_why(api: openai.OpenAI, arguments: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        api.images.generate(**arguments)
    error = caught.value
    assert words in str(error)
    assert (error.param, error.type, error.code) == (param, "invalid_request_error", "invalid_value")


def test_an_unknown_model_is_not_found(api: openai.OpenAI, generator: Generator) -> None:
    for ask in (lambda: api.models.retrieve("gpt/x"), lambda: api.images.generate(prompt="7", model="gpt/x")):
        with pytest.raises(openai.NotFoundError, match=f"model: unknown; there are {generator.bundle.name}") as caught:
            ask()
        assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_other_endpoints_are_named(api: openai.OpenAI) -> None:
    with pytest.raises(
        openai.NotFoundError, match="there is no POST /v1/chat/completions; there are POST /v1/im"
    ) as one:
        api.chat.completions.create(model="x", messages=[])
    assert (one.value.type, one.value.code, one.value.param) == ("invalid_request_error", "not_found", None)
    with pytest.raises(openai.APIStatusError, match="there is no DELETE /v1/models/x; there are") as other:
        api.models.delete("x")
    assert (other.value.status_code, other.value.code) == (405, "method_not_allowed")
    assert other.value.response.headers["allow"] == "GET"


def test_tokens_and_large_bodies(application: Any, serving: Any) -> None:
    app = application(tokens=(f"alice:{hash_token(TOKEN)}",), max_body_bytes=1024)
    with serving(app) as client:
        with connect(client, "wrong") as stranger:
            for ask in (lambda: stranger.images.generate(prompt="7"), stranger.models.list):
                with pytest.raises(openai.AuthenticationError, match="unknown token") as refused:
                    ask()
                assert refused.value.code == "invalid_api_key"
        with connect(client, TOKEN) as alice:
            assert len(list(alice.models.list())) == 1
            with pytest.raises(openai.APIStatusError, match="body: should have at most 1024 bytes") as large:
                alice.images.generate(prompt="7", user="x" * 2000)
            assert (large.value.status_code, large.value.code) == (413, "request_too_large")


def test_a_full_queue_and_a_full_share(application: Any, serving: Any) -> None:
    for settings, status, kind, code in (
        ({"max_client": 4}, 429, "rate_limit_error", "rate_limit_exceeded"),
        ({"max_queued": 4}, 503, "server_error", "service_unavailable"),
    ):
        with serving(application(max_count=4, **settings)) as client, connect(client) as api:
            with client.stream(
                "POST", "/generate", json={"count": 4, "steps": 200}, headers={"Accept": "application/x-ndjson"}
            ) as first:
                # the first line comes once the request is in the queue
                next(first.iter_lines())
                with pytest.raises(openai.APIStatusError, match="images") as caught:
                    api.images.generate(prompt="7")
            assert (caught.value.status_code, caught.value.type, caught.value.code) == (status, kind, code)
            assert int(caught.value.response.headers["retry-after"]) >= 1


def test_a_failure_inside_and_a_stop(application: Any, serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    app = application()
    with serving(app) as client, connect(client) as api:
        with monkeypatch.context() as patch:
            patch.setattr("rapid_server.openai_api.responses.base64_png", lambda *_: 1 / 0)
            with pytest.raises(openai.InternalServerError, match="Error code: 500 - internal error") as failed:
                api.images.generate(prompt="7")
        assert (failed.value.type, failed.value.code) == ("server_error", "internal_error")
        app.state.engine.close()
        with pytest.raises(openai.InternalServerError, match="Error code: 503 - the server is stopping") as stopped:
            api.images.generate(prompt="7")
        assert stopped.value.code == "service_unavailable"
