import json

import pytest
from pydantic import ValidationError
from rapid_index import CorruptKnowledgeBase, KnowledgeBaseError, Manifest

FILES = dict.fromkeys(("keys.faiss", "values.npy", "labels.npy"), "0" * 64)
GOOD = {
    "size": 5,
    "key_dim": 4,
    "value_shape": (4, 8, 8),
    "k": 600,
    "v": 200,
    "timesteps": 1000,
    "networks": {"encoder": "e" * 64},
    "files": FILES,
    "sizes": dict.fromkeys(FILES, 1),
}


def test_defaults_and_round_trip(tmp_path):
    manifest = Manifest(**GOOD)
    assert (manifest.format, manifest.metric, manifest.index_type, manifest.value_dtype) == (1, "l2", "flat", "float32")
    (tmp_path / "manifest.json").write_text(manifest.model_dump_json())
    assert Manifest.read(tmp_path) == manifest


@pytest.mark.parametrize(
    "change",
    [
        {"v": 0},
        {"v": 600},
        {"k": 1001},
        {"v": 700},
        {"size": 0},
        {"size": "5"},
        {"key_dim": 0},
        {"value_shape": (4, 0)},
        {"value_dtype": "float16"},
        {"metric": "ip"},
        {"index_type": "pq"},
        {"networks": {"encoder": "short"}},
        {"networks": {"": "e" * 64}},
        {"files": {"keys.faiss": "0" * 64}},
        {"files": {**FILES, "../other": "0" * 64}},
        {"sizes": {}},
        {"surprise": 1},
    ],
)
def test_wrong_fields_are_refused(change):
    with pytest.raises(ValidationError):
        Manifest(**{**GOOD, **change})


@pytest.mark.parametrize("steps", [{"v": 1, "k": 2, "timesteps": 2}, {"v": 999, "k": 1000}])
def test_extreme_steps_are_allowed(steps):
    Manifest(**{**GOOD, **steps})


def test_is_frozen():
    with pytest.raises(ValidationError):
        Manifest(**GOOD).k = 3


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"format": 1}', b"[" * 100_000])
def test_what_is_no_manifest_is_corrupt_in_one_line(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(CorruptKnowledgeBase, match=r"manifest\.json: not a manifest") as caught:
        Manifest.read(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_manifest_or_folder_names_the_folder(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "file"):
        with pytest.raises(CorruptKnowledgeBase, match=f"{folder}: no knowledge base here"):
            Manifest.read(folder)


def test_newer_format_is_named(tmp_path):
    text = json.dumps({**Manifest(**GOOD).model_dump(), "format": 2, "new_field": 1})
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(KnowledgeBaseError, match=r"has format 2, this version reads format 1") as caught:
        Manifest.read(tmp_path)
    assert not isinstance(caught.value, CorruptKnowledgeBase)
