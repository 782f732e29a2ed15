"""The settings of the server: precedence, words for what is wrong, and nothing secret shown."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr, ValidationError
from rapid_server.auth import Tokens, hash_token, new_token
from rapid_server.setting_types import NAME, is_loopback
from rapid_server.settings import ServerSettings, load

from rapid.cli import main
from rapid.errors import InputError

HASH = "ab" * 32
NAMES = st.from_regex(NAME, fullmatch=True)
# the name of a setting, then a value of a flag, of the environment and of the file, and what they are read as
VALUES: dict[str, list[tuple[Any, Any]]] = {
    "host": [("::1", "::1"), ("127.0.0.2", "127.0.0.2"), ("localhost", "localhost")],
    "port": [(1, 1), ("2", 2), (3, 3)],
    "device": [("cpu", "cpu"), ("cuda", "cuda"), ("cpu", "cpu")],
    "open": [(True, True), ("false", False), (True, True)],
    "cors_origins": [(["https://a"], ("https://a",)), ("https://b, https://c:1", ("https://b", "https://c:1")),
                     (["*"], ("*",))],
    "allowed_hosts": [(["A.example"], ("a.example",)), ("b, [::2]", ("b", "::2")), (["*"], ("*",))],
    "max_count": [(1, 1), ("2", 2), (3, 3)],
    "max_steps": [(1, 1), ("2", 2), (3, 3)],
    "max_queued": [(10001, 10001), ("10002", 10002), (10003, 10003)],
    "max_client": [(10001, 10001), ("10002", 10002), (10003, 10003)],
    "image_bytes": [(1, 1), ("2", 2), (3, 3)],
    "max_body_bytes": [(1, 1), ("2", 2), (3, 3)],
    "max_bodies_bytes": [(2**21, 2**21), (str(2**22), 2**22), (2**23, 2**23)],
    "max_connections": [(1, 1), ("2", 2), (3, 3)],
    "grace_seconds": [(1.5, 1.5), ("2", 2.0), (0, 0.0)],
    "log_format": [("json", "json"), ("text", "text"), ("json", "json")],
    "batch": [(1, 1), ("2", 2), (3, 3)],
    "model": [(["a=x"], ("a=x",)), ('["b=y,z", "c=w"]', ("b=y,z", "c=w")), (["d"], ("d",))],
}  # fmt: skip
DEFAULTS = {
    "host": "127.0.0.1", "port": 8000, "device": "auto", "tokens": (), "open": False, "cors_origins": (),
    "allowed_hosts": (),
    "max_count": 10_000, "image_bytes": 12_288,
    "max_steps": 200, "max_queued": 50_000, "max_client": 20_000, "max_body_bytes": 1024 * 1024,
    "max_bodies_bytes": 2**28, "max_connections": 2048, "grace_seconds": 7.0, "log_format": "text", "batch": None,
}  # fmt: skip


def write(folder: Path, content: object) -> Path:
    path = folder / "settings.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content), encoding="utf-8")
    return path


def variable(name: str) -> str:
    return f"RAPID_SERVE_{name.upper()}"


def test_defaults() -> None:
    settings = load({"model": ["m"], "host": None, "settings": None}, {"HOME": "/root", variable("port"): ""})
    assert {name: value for name, value in settings if name != "model"} == DEFAULTS
    assert set(VALUES) | {"tokens"} == set(ServerSettings.model_fields)


@pytest.mark.parametrize("where", [where for n in range(4) for where in itertools.combinations(range(3), n)])
@pytest.mark.parametrize("name", VALUES)
def test_precedence(tmp_path: Path, name: str, where: tuple[int, ...]) -> None:
    flags: dict[str, object] = {"model": ["m"]} if name != "model" else {}
    environ: dict[str, str] = {}
    if 0 in where:
        flags[name] = VALUES[name][0][0]
    if 1 in where:
        environ[variable(name)] = VALUES[name][1][0]
    if 2 in where:
        environ[variable("settings")] = str(write(tmp_path, {name: VALUES[name][2][0]}))
    if not where:
        if name == "model":
            with pytest.raises(InputError, match="model: is missing; give the folder of a bundle"):
                load(flags, environ)
        else:
            assert f"\n{name}: {json.dumps(DEFAULTS[name])} (default)" in load(flags, environ).shown()
        return
    settings = load(flags, environ)
    assert getattr(settings, name) == VALUES[name][where[0]][1]
    origin = ("flag", "environment", "file")[where[0]]
    assert next(line for line in settings.shown().split("\n") if line.startswith(f"{name}: ")).endswith(f" ({origin})")


def test_the_file_of_the_flag_comes_before_that_of_the_environment(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    one, other = write(tmp_path, {"port": 1, "model": "m"}), write(tmp_path / "other", {"port": 2, "model": "m"})
    assert load({"settings": one}, {variable("settings"): str(other)}).port == 1
    assert load({"settings": None}, {variable("settings"): str(other)}).port == 2


def test_the_environment_of_the_process_is_not_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable("port"), "1")
    assert ServerSettings(model=("m",)).port == 8000
    assert load({"model": ["m"]}, {}).port == 8000


@given(st.lists(st.tuples(NAMES, st.text("abc/.-= é", min_size=1)), min_size=1, unique_by=lambda pair: pair[0]))
def test_lists_of_the_environment_and_models(pairs: list[tuple[str, str]]) -> None:
    entries = [f"{name}={folder}" for name, folder in pairs if set(name) != {"."}]
    if not entries:
        return
    settings = load({}, {variable("model"): json.dumps(entries)})
    assert settings.model == tuple(entries)
    assert list(settings.models.items()) == [(name, Path(folder)) for name, folder in pairs if set(name) != {"."}]
    if all(entry == entry.strip() for entry in entries):
        assert load({}, {variable("model"): " , ".join(entries)}).model == settings.model


def test_a_model_without_a_name_has_that_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundle-2").mkdir()
    (tmp_path / "link").symlink_to("bundle-2")
    settings = load({"model": ["link", f"{tmp_path}/a=b/name", "."]}, {})
    assert list(settings.models) == ["bundle-2", "name", tmp_path.resolve().name]
    assert settings.models["bundle-2"] == Path("link")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("port", "70000", "70000: should be at most 65535"),
        ("port", "http", "http: should be a whole number"),
        ("max_count", "0", "0: should be at least 1"),
        ("max_count", "20001", "20001: is more than max_client (20000): such a request could never be served"),
        ("max_client", "5", None),
        ("batch", "0", "0: should be at least 1"),
        ("grace_seconds", "nan", "nan: should be a finite number"),
        ("grace_seconds", "inf", "inf: should be a finite number"),
        ("open", "perhaps", "perhaps: should be true or false"),
        ("log_format", "xml", "xml: should be 'text' or 'json'"),
        ("model", "[", "[: starts like a JSON list, but is not valid JSON"),
        ("model", "[1]", "1: should be text"),
        ("model", "ok,a b=x", "a b=x: write NAME=DIR, with a name"),
        ("model", "..=x", "..=x: write NAME=DIR, with a name"),
        ("model", "/", "/: write NAME=DIR, with a name"),
        ("model", "a=", "a=: should be DIR or NAME=DIR"),
        ("model", "a=x,b=y,a=z", "two bundles are named a; write NAME=DIR"),
        ("model", "/x/a,/y/a", "two bundles are named a; write NAME=DIR"),
        ("model", ",", ",: give the folder of a bundle"),
        ("cors_origins", "https://a/", "https://a/: should be an origin such as https://example.org"),
        ("cors_origins", "https://b,example.org", "example.org: should be an origin"),
        ("cors_origins", "https://me:pass@a", "should be an origin"),
        ("allowed_hosts", "https://a", "https://a: should be a name or an address such as images.example.org"),
        ("allowed_hosts", "a:80", "a:80: should be a name or an address"),
        ("allowed_hosts", "b,*.a", "*.a: should be a name or an address"),
        ("host", "0.0.0.0", "0.0.0.0: would serve anyone who reaches it: make a token with `rapid token NAME`"),
        ("host", "", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("origin", ["flag", "environment", "file"])
def test_what_does_not_fit_is_told(tmp_path: Path, origin: str, name: str, value: str, words: str | None) -> None:
    flags: dict[str, object] = {"model": ["m"]} if name != "model" else {}
    environ: dict[str, str] = {}
    field = {"cors_origins": "cors_origin", "allowed_hosts": "allowed_host"}.get(name, name)
    where = {"flag": variable(name) if name == "grace_seconds" else field, "environment": variable(name)}.get(origin)
    if origin == "flag":
        flags[name] = value
    elif origin == "environment":
        environ[variable(name)] = value
    else:
        flags["settings"] = write(tmp_path, {name: value})
        where = f"{flags['settings']}: {name}"
    if words is None:
        # told of another setting than this one, or empty in the environment, which is not given
        if not (origin == "environment" and value == ""):
            with pytest.raises(InputError):
                load(flags, environ)
        return
    with pytest.raises(InputError) as caught:
        load(flags, environ)
    assert str(caught.value).startswith(f"{where} ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("prot: 8000", "settings.yaml: prot: is not a setting; known are model, host, port"),
        ("1: 8000", "1: is not a setting"),
        ("_env_file: x", "_env_file: is not a setting"),
        ("- 8000", "should have lines such as `port: 8000`"),
        ("port: 1\n  host: {", "line 2: is not YAML"),
        ("port: " + "[" * 2000, "is not YAML"),
        ("port: {a: 1}", "port {'a': 1}: should be a whole number"),
        ("tokens: {alice: abc}", "settings.yaml: tokens: should be a list"),
        ("tokens: [{alice: abc}]", "settings.yaml: tokens entry 1: should be text"),
        ("model: {alice: abc}", "should be a list"),
        ("port: 1\ntokens: []\nport: 2", "line 1: is not YAML in UTF-8, or has a name twice"),
    ],
)  # fmt: skip
def test_a_bad_file_is_told(tmp_path: Path, content: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        load({"settings": write(tmp_path, content), "model": None if "model" in content else ["m"]}, {})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"settings .*none: cannot be read"):
        load({"settings": tmp_path / "none"}, {})
    with pytest.raises(InputError, match=r"RAPID_SERVE_SETTINGS .*: cannot be read \(Is a directory\)"):
        load({}, {variable("settings"): str(tmp_path)})
    (tmp_path / "latin").write_bytes(b"device: \xff")
    with pytest.raises(InputError, match="is not YAML in UTF-8"):
        load({"settings": tmp_path / "latin"}, {})
    assert load({"settings": write(tmp_path, ""), "model": ["m"]}, {}).port == 8000


def test_an_unknown_variable_is_told() -> None:
    with pytest.raises(InputError, match="RAPID_SERVE_MAXCOUNT: is not a setting; known are RAPID_SERVE_SETTINGS, RAP"):
        load({"model": ["m"]}, {"RAPID_SERVE_MAXCOUNT": "1", "RAPID_LEDGER": "x"})


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
        ("::", False), ("192.168.0.1", False), ("", False), ("127.1", False), ("localhost.example.org", False),
    ],
)  # fmt: skip
def test_only_loopback_is_open_by_itself(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    flags: dict[str, object] = {"model": ["m"], "host": host}
    if loopback:
        load(flags, {})
    else:
        with pytest.raises(InputError, match=r"rapid token NAME.* or use --open"):
            load(flags, {})
    load(flags | {"open": True}, {})
    load(flags, {variable("tokens"): f"alice:{HASH}"})
    with pytest.raises(InputError, match="open True: with tokens, every request needs one"):
        load(flags | {"open": True}, {variable("tokens"): f"alice:{HASH}"})


def test_tokens_are_never_shown(tmp_path: Path) -> None:
    token = new_token()
    entries = [f"alice:{hash_token(token)}", f"bob:{HASH}", f"alice:{HASH[::-1]}"]
    file = {"model": "m", "tokens": entries}
    for flags, environ in (
        ({"settings": write(tmp_path, file)}, {}),
        ({"model": ["m"]}, {variable("tokens"): ",".join(entries)}),
        ({"model": ["m"]}, {variable("tokens"): json.dumps(entries)}),
    ):
        settings = load(flags, environ)
        assert Tokens(settings.tokens).client_of(f"Bearer {token}") == "alice"
        shown = settings.shown()
        assert 'tokens: ["alice: set", "bob: set", "alice: set"] (' in shown
        for text in (shown, repr(settings), str(settings), settings.model_dump_json()):
            assert HASH not in text
            assert HASH[::-1] not in text
            assert hash_token(token) not in text


SECRET = "rapid_VerySecretTokenThatSomebodyPastedWhereItsHashBelongs"


@pytest.mark.parametrize(
    "value",
    [SECRET, f"alice:{SECRET}", f"alice={HASH}:{SECRET}", f'["alice:{SECRET}"', f'["alice:{SECRET}"] {HASH}',
     f"bob:{HASH},alice:{SECRET}", f"bob:{HASH},alice:{HASH}", f"a b:{HASH}", f"bob:{HASH.upper()}"],
)  # fmt: skip
def test_errors_do_not_hold_what_was_given_as_a_token(tmp_path: Path, value: str) -> None:
    contents = [{"tokens": value}, {"tokens": [value]}, {"tokens": [{"alice": value}]}, {value: 1}]
    contents += [f"tokens: [{value}", f"tokens:\n  - x\n {value}", value]  # type: ignore[list-item]
    sources: list[tuple[dict[str, object], dict[str, str]]] = [({}, {variable("tokens"): value})]
    for number, content in enumerate(contents):
        (tmp_path / str(number)).mkdir()
        sources.append(({"settings": write(tmp_path / str(number), content)}, {}))
    for flags, environ in sources:
        with pytest.raises(InputError) as caught:
            load(flags | {"model": ["m"]}, environ)
        assert "Secret" not in str(caught.value)
        assert HASH not in str(caught.value).lower()
        assert "\n" not in str(caught.value)
    with pytest.raises(ValidationError) as refused:
        ServerSettings(model=("m",), tokens=(SecretStr(value), SecretStr(value)))
    assert "Secret" not in str(refused.value)
    assert HASH not in str(refused.value).lower()


def test_settings_are_frozen_and_shown_in_one_line_each() -> None:
    settings = load({"model": ["name=a\nb"]}, {})
    assert len(settings.shown().split("\n")) == len(ServerSettings.model_fields)
    with pytest.raises(ValidationError):
        settings.port = 1  # type: ignore[misc]


def test_rapid_token(capsys: pytest.CaptureFixture[str]) -> None:
    made = set()
    for _ in range(2):
        assert main(["token", "alice"]) == 0
        told = capsys.readouterr()
        token, entry = told.out.splitlines()
        assert entry == f"alice:{hash_token(token)}"
        assert token not in told.err
        assert load({"model": ["m"]}, {variable("tokens"): entry}).tokens == (SecretStr(entry),)
        made.add(token)
    assert len(made) == 2
    assert main(["token", "a b"]) == 2
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "rapid: NAME a b: use 1 to 64 characters of A-Z, a-z, 0-9, '.', '_' and '-'\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--model: is missing; give the folder of a bundle"),
        ("--model /a/x --model /b/x", "--model ['/a/x', '/b/x']: two bundles are named x"),
        ("--model m --host 0.0.0.0", "--host 0.0.0.0: would serve anyone"),
        ("--model m --host 0.0.0.0 --open --no-open", "--host 0.0.0.0: would serve anyone"),
        ("--model m --host 0.0.0.0 --open --port 70000", "--port 70000: should be at most 65535"),
        ("--model m --settings none.yaml", "--settings none.yaml: cannot be read"),
        ("--model m --cors-origin https://a --cors-origin x", "--cors-origin x: should be an origin"),
        ("--model m --max-count 9 --max-queued 8", "--max-count 9: is more than max_queued (8)"),
        ("--model m --max-client 8", "--max-count: is more than max_client (8)"),
        ("--model m --batch 0 --log-format json --device cpu", "--batch 0: should be at least 1"),
    ],
)
def test_bad_flags_are_one_line(capsys: pytest.CaptureFixture[str], arguments: str, words: str) -> None:
    assert main(["serve", *arguments.split()]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"rapid: {words}")
    assert told.err.count("\n") == 1


def test_flags_that_are_not_given_override_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable("host"), "192.0.2.1")
    monkeypatch.setenv(variable("model"), "m")
    assert main(["serve"]) == 2
    assert capsys.readouterr().err.startswith("rapid: RAPID_SERVE_HOST 192.0.2.1: would serve anyone")
    monkeypatch.setenv(variable("open"), "true")
    assert main(["serve"]) == 2  # and then the port cannot be had
    assert capsys.readouterr().err.startswith("rapid: --host 192.0.2.1: not an address of this machine")
    assert main(["serve", "--no-open"]) == 2
    assert capsys.readouterr().err.startswith("rapid: RAPID_SERVE_HOST 192.0.2.1: would serve anyone")
