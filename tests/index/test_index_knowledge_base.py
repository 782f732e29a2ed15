import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from rapid_index import CorruptKnowledgeBase, ForeignKnowledgeBase, KnowledgeBase, KnowledgeBaseError
from rapid_index.files import sha256

FILES = ["manifest.json", "keys.faiss", "values.npy", "labels.npy"]


@pytest.fixture
def path(tmp_path, build):
    return build(tmp_path / "kb", np.random.default_rng(0).standard_normal((20, 4)))


def edit_manifest(path, rehash=False, **changes):
    manifest = json.loads((path / "manifest.json").read_text()) | changes
    if rehash:
        manifest["files"] = {name: sha256(path / name) for name in FILES[1:]}
        manifest["sizes"] = {name: (path / name).stat().st_size for name in FILES[1:]}
    (path / "manifest.json").write_text(json.dumps(manifest))


def assert_corrupt(path, match, **options):
    with pytest.raises(CorruptKnowledgeBase, match=match) as caught:
        KnowledgeBase.open(path, **options)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_it_holds(path, networks):
    kb = KnowledgeBase.open(path, networks)
    assert len(kb) == kb.manifest.size == 20
    assert kb.labels.dtype == np.int64
    assert kb.labels.tolist() == [i % 10 for i in range(20)]
    assert not kb.labels.flags.writeable


def test_values_are_memory_mapped_and_copied_out(path):
    kb = KnowledgeBase.open(path)
    assert isinstance(kb._values, np.memmap)
    out = kb.values(np.array([3, 3]))
    assert type(out) is np.ndarray
    assert out.flags.writeable and out.flags.owndata
    out[:] = -1
    assert (kb.values(np.array([3])) == 3).all()


@pytest.fixture(scope="module")
def shared(tmp_path_factory, build):
    return KnowledgeBase.open(build(tmp_path_factory.mktemp("shared") / "kb", np.eye(20)))


@settings(max_examples=40, deadline=None)
@given(
    indices=hnp.arrays(
        st.sampled_from([np.int64, np.int32, np.uint64, np.uint8]),
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        elements=st.integers(0, 19),
    )
)
def test_values_of_indices_of_any_shape(shared, indices):
    out = shared.values(indices)
    assert out.dtype == np.float32
    assert out.shape == (*indices.shape, 2, 3)
    assert np.array_equal(out, np.broadcast_to(indices[..., None, None], out.shape))


@pytest.mark.parametrize("wrong", [[-1], [20], [0, 99], [0.5], [True], np.array([2**63], np.uint64)])
def test_values_of_wrong_indices(path, wrong):
    with pytest.raises(ValueError, match="indices must be"):
        KnowledgeBase.open(path).values(np.asarray(wrong))


def test_labels_and_values_belong_to_what_was_found(tmp_path, build):
    rng = np.random.default_rng(3)
    keys, labels = rng.standard_normal((300, 6)).astype(np.float32), rng.integers(0, 1000, 300)
    kb = KnowledgeBase.open(build(tmp_path / "kb", keys, labels=labels, batch=11))
    chosen = rng.permutation(300)[:40]
    found = kb.search(keys[chosen]).indices[:, 0]
    assert np.array_equal(kb.labels[found], labels[chosen])
    assert np.array_equal(kb.values(found)[:, 0, 0], chosen)


@pytest.mark.parametrize("index_type", ["flat", "hnsw", "ivf"])
def test_one_entry(tmp_path, build, index_type):
    kb = KnowledgeBase.open(build(tmp_path / "kb", [[1.0, 2.0]], index_type=index_type))
    found = kb.search(np.array([[1, 0], [np.nan, 1e38]], np.float32))
    assert found.indices.tolist() == [[0], [0]]
    assert found.distances[0, 0] == 4
    with pytest.raises(ValueError, match=r"neighbours must be in 1\.\.1 "):
        kb.search(np.zeros((1, 2), np.float32), 2)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_missing_files(path, name, verify):
    (path / name).unlink()
    assert_corrupt(path, "missing", verify=verify)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.95])
def test_truncated_files(path, name, keep, verify):
    content = (path / name).read_bytes()
    (path / name).write_bytes(content[: int(keep * len(content))])
    assert_corrupt(path, name, verify=verify)


@pytest.mark.parametrize("name", FILES[1:])
def test_files_that_grew(path, name):
    with (path / name).open("ab") as file:
        file.write(b"\0")
    assert_corrupt(path, f"{name}: .* bytes, not", verify=False)


@pytest.mark.parametrize("name", FILES[1:])
@pytest.mark.parametrize("place", [0, 20, -1])
def test_altered_files(path, name, place):
    content = bytearray((path / name).read_bytes())
    content[place] ^= 1
    (path / name).write_bytes(content)
    assert_corrupt(path, f"{name}: altered")


def test_altered_values_alone_are_left_to_a_later_check(path):
    for name in FILES[1:]:
        kept = (path / name).read_bytes()
        (path / name).write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        if name == "values.npy":
            assert len(KnowledgeBase.open(path, verify=False)) == 20
        else:
            assert_corrupt(path, f"{name}: altered", verify=False)
        (path / name).write_bytes(kept)


@pytest.mark.parametrize("index_type", ["flat", "hnsw", "ivf"])
@pytest.mark.parametrize("content", [b"", b"IxF2", b"nonsense" * 40])
def test_a_file_that_faiss_cannot_read_is_no_crash(tmp_path, build, index_type, content):
    path = build(tmp_path / "kb", np.eye(8), index_type=index_type)
    (path / "keys.faiss").write_bytes(content or (path / "keys.faiss").read_bytes()[:-9])
    edit_manifest(path, rehash=True)
    assert_corrupt(path, r"keys\.faiss: faiss cannot read it")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"size": 19}, "labels"),
        ({"size": 10**15}, "labels"),
        ({"key_dim": 5}, "keys"),
        ({"index_type": "ivf"}, "keys"),
        ({"index_type": "hnsw"}, "keys"),
        ({"value_shape": [3, 2]}, "values"),
        ({"value_shape": []}, "values"),
    ],
)
def test_files_that_do_not_fit_the_manifest(path, changes, name):
    edit_manifest(path, **changes)
    assert_corrupt(path, rf"{name}\.\w+: holds .* the manifest says")


@pytest.mark.parametrize("name", ["values.npy", "labels.npy"])
def test_other_arrays_in_the_place_of_values_and_labels(path, name):
    good = np.load(path / name)
    objects = np.array([None] * 20, dtype=object)
    for other in (good.astype(np.float64), good[:-1], np.asfortranarray(good)[..., None], objects):
        np.save(path / name, other, allow_pickle=True)
        edit_manifest(path, rehash=True)
        assert_corrupt(path, name)
    (path / name).write_bytes(b"nonsense")
    edit_manifest(path, rehash=True)
    assert_corrupt(path, f"{name}: not an .npy file")


def test_keys_for_inner_products_are_refused(path):
    import faiss

    other = faiss.IndexFlatIP(4)
    other.add(np.zeros((20, 4), np.float32))
    faiss.write_index(other, str(path / "keys.faiss"))
    edit_manifest(path, rehash=True)
    assert_corrupt(path, "the manifest says l2 flat")


def test_keys_that_are_not_finite_are_refused_by_search(path):
    import faiss

    other = faiss.IndexFlatL2(4)
    other.add(np.full((20, 4), np.nan, np.float32))
    faiss.write_index(other, str(path / "keys.faiss"))
    edit_manifest(path, rehash=True)
    kb = KnowledgeBase.open(path)
    with pytest.raises(CorruptKnowledgeBase, match="not finite"):
        kb.search(np.zeros((1, 4), np.float32))


def test_foreign_networks_are_named(path, networks):
    for changes, name in (({"encoder": "f" * 64}, "encoder"), ({"extra": "0" * 64}, "extra")):
        with pytest.raises(ForeignKnowledgeBase, match=f"another network '{name}'") as caught:
            KnowledgeBase.open(path, {**networks, **changes})
        assert str(path) in str(caught.value)
    del networks["denoiser"]
    with pytest.raises(ForeignKnowledgeBase, match=r"another network 'denoiser'.*given none"):
        KnowledgeBase.open(path, networks)
    with pytest.raises(ForeignKnowledgeBase):
        KnowledgeBase.open(path, {})


def test_errors_form_one_family():
    assert issubclass(ForeignKnowledgeBase, KnowledgeBaseError)
    assert issubclass(CorruptKnowledgeBase, KnowledgeBaseError)


def test_threads_share_it(path):
    from concurrent.futures import ThreadPoolExecutor

    kb = KnowledgeBase.open(path)
    queries = np.random.default_rng(1).standard_normal((200, 4)).astype(np.float32)
    expected = kb.search(queries, 3).indices
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: kb.search(queries, 3).indices, range(8)):
            assert np.array_equal(found, expected)


def test_a_moved_folder_still_opens(path, networks):
    moved = path.rename(path.with_name("elsewhere"))
    assert len(KnowledgeBase.open(moved, networks)) == 20
