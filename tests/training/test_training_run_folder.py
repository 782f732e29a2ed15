"""Run folders: begun once, resumed with the same manifest, never mixed with something else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests_children import stay_in
from tests_process import start, wait_for

from rapid.errors import InputError
from rapid.training import RunFolder

MANIFEST = {"settings": {"steps": 3, "classes": ("a", "b")}, "epsilon": 1.0}


def enter(out: Path, *, resume: bool = False, command: str = "train-private", **changes: Any) -> Any:
    return RunFolder.enter(out, command, MANIFEST | changes, resume=resume)


def test_a_new_folder_and_then_the_same_run(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with enter(out) as run_folder:
        assert (run_folder.out, run_folder.new) == (out, True)
        assert run_folder.checkpoint("denoiser") == out / "checkpoints" / "denoiser.pt"
        # as it comes back from JSON
        written = {"command": "train-private", "settings": {"steps": 3, "classes": ["a", "b"]}, "epsilon": 1.0}
        assert run_folder.earlier() == written == json.loads((out / "checkpoints" / "manifest.json").read_text())
    with enter(out, resume=True) as run_folder:
        assert not run_folder.new


def test_what_is_remembered_need_not_be_asked_for_again(tmp_path: Path) -> None:
    out, told = tmp_path / "out", {"private": {"steps": 3}}
    with RunFolder.enter(out, "build-kb", MANIFEST, resume=False, remembered=told):
        (out / "denoiser").mkdir()
    for later in ({}, {"private": {"steps": 4}}):
        with RunFolder.enter(out, "build-kb", MANIFEST, resume=True, remembered=later) as run_folder:
            assert (run_folder.earlier() or {})["remembered"] == told
    with pytest.raises(InputError, match="another"), enter(out, command="build-kb", resume=True, seed=2):
        pass


def test_an_empty_folder_may_be_given_and_a_new_one_resumed(tmp_path: Path) -> None:
    with enter(tmp_path) as run_folder:
        assert run_folder.new
    with enter(tmp_path / "new", resume=True) as run_folder:
        assert run_folder.new


def test_an_earlier_run_is_not_begun_again(tmp_path: Path) -> None:
    with enter(tmp_path / "out"):
        pass
    with (
        pytest.raises(InputError, match=r"^out .*holds an earlier run; continue with --resume"),
        enter(tmp_path / "out"),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"epsilon": 2.0}, "'epsilon'"),
        ({"settings": {"steps": 4, "classes": ("a", "b")}}, r"'settings\.steps'"),
        ({"settings": {"steps": 3, "classes": ("a",)}}, r"'settings\.classes'"),
        ({"settings": {"steps": 3}}, r"'settings\.classes'"),
        ({"delta": 0.1}, "'delta'"),
        ({"command": "build-kb"}, "'command'"),
    ],
)
def test_another_manifest_is_refused_by_its_first_difference(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with enter(tmp_path / "out"):
        pass
    again = enter(tmp_path / "out", resume=True, **changes)
    with pytest.raises(InputError, match=f"holds a run with another {told}"), again:
        pass


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"dataset_size": 599}, "has 599 images, and the run in --out had 600; give the same images, or a new --out"),
        ({"dataset_size": 600, "unit": "one person"}, "is counted in people, and was in images by the run in --out"),
        ({"dataset_size": 40, "unit": "one person"}, "is counted in people, and was in images by the run in --out"),
        ({"classes": ("a", "b", "c")}, "has other classes than the run in --out had; declare the same --classes"),
    ],
)
def test_other_images_are_told_before_what_follows_from_them(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    """As in the manifest of a private run, whose delta and settings may depend on the number of images."""
    facts = {"delta": 1e-4, "dataset_size": 600, "classes": ("a", "b"), "settings": {"private": {"steps": 3}}}
    later = facts | {"delta": 2e-4, "settings": {"private": {"steps": 4}}}
    with enter(tmp_path / "out", **facts):
        pass
    with pytest.raises(InputError) as refused, enter(tmp_path / "out", resume=True, **later | changes):
        pass
    assert refused.value.field == "private"
    assert refused.value.problem.startswith(told)
    # with the same images, what the user gave is to blame, and so is another command
    with pytest.raises(InputError, match="another 'settings"), enter(tmp_path / "out", resume=True, **later):
        pass
    with pytest.raises(InputError, match="another 'command'"):
        enter(tmp_path / "out", resume=True, command="tune", **later | changes).__enter__()


def test_people_are_counted_as_people(tmp_path: Path) -> None:
    facts = {"dataset_size": 40, "classes": (), "unit": "one person"}
    with enter(tmp_path / "out", **facts):
        pass
    again = enter(tmp_path / "out", resume=True, **facts | {"dataset_size": 41})
    with pytest.raises(InputError, match="private: has 41 people, and the run in --out had 40;"), again:
        pass


@pytest.mark.parametrize("resume", [False, True])
def test_something_else_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files"), enter(tmp_path, resume=resume):
        pass
    with pytest.raises(InputError, match="is a file"), enter(tmp_path / "thesis.txt", resume=resume):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    shutil.rmtree(tmp_path)
    (tmp_path / "checkpoints").mkdir(parents=True)
    (tmp_path / "checkpoints" / "denoiser.pt").write_text("of a run whose manifest is lost")
    with pytest.raises(InputError, match="holds other files"), enter(tmp_path, resume=resume):
        pass


def test_a_run_that_was_killed_before_it_wrote_its_manifest_has_not_begun(tmp_path: Path) -> None:
    inside = tmp_path / "checkpoints"
    (inside / ".manifest.json.x7").mkdir(parents=True)
    (inside / "lock").touch()
    with enter(tmp_path) as run_folder:
        assert run_folder.new
        assert not (inside / ".manifest.json.x7").exists()


def test_no_two_processes_work_in_it(tmp_path: Path) -> None:
    with enter(tmp_path):
        pass
    entered = tmp_path.with_name(f"{tmp_path.name}-entered")
    other = start(stay_in, tmp_path, "train-private", MANIFEST, entered)
    wait_for(entered)
    with pytest.raises(InputError, match="is in use by another process"), enter(tmp_path, resume=True):
        pass
    # the lock goes with its process, however that ends
    other.kill()
    other.join()
    with enter(tmp_path, resume=True):
        pass


def test_what_killed_runs_left_half_written_is_removed(tmp_path: Path) -> None:
    with enter(tmp_path):
        pass
    half = [tmp_path / ".denoiser.ab12", tmp_path / "checkpoints" / ".denoiser.pt.cd34"]
    whole = [tmp_path / "autoencoder", tmp_path / "checkpoints" / "denoiser.pt"]
    for path in (*half, whole[0]):
        path.mkdir()
        (path / "weights").touch()
    whole[1].touch()
    with enter(tmp_path, resume=True):
        assert not any(path.exists() for path in half)
        assert all(path.exists() for path in whole)


def test_a_run_has_one_name_and_its_copy_another(tmp_path: Path) -> None:
    with enter(tmp_path / "out") as run_folder:
        name = run_folder.run_name()
        assert name == run_folder.run_name()
    with enter(tmp_path / "out", resume=True) as run_folder:
        assert run_folder.run_name() == name
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    with enter(tmp_path / "copy", resume=True) as run_folder:
        assert run_folder.run_name() != name
        assert run_folder.earlier_names() == (name,)
    (tmp_path / "out").rename(tmp_path / "renamed")
    assert RunFolder(tmp_path / "renamed").run_name() == name
    assert RunFolder(tmp_path / "renamed").earlier_names() == ()
    (tmp_path / "renamed").rename(tmp_path / "out")
    assert RunFolder(tmp_path / "out").run_name() == name
    # as after a restart that numbers disks anew; a copy elsewhere has neither place
    file = tmp_path / "out" / "checkpoints" / "run.json"
    written = json.loads(file.read_text())
    file.write_text(json.dumps(written | {"folder": [written["folder"][0], "other"]}))
    assert RunFolder(tmp_path / "out").run_name() == name
    file.write_text(json.dumps(written | {"folder": ["other", "another"]}))
    assert RunFolder(tmp_path / "out").run_name() != name
    # it tells nothing of where it was
    assert str(tmp_path) not in (tmp_path / "out" / "checkpoints" / "run.json").read_text()
    (tmp_path / "out" / "checkpoints" / "run.json").write_text("{")
    assert RunFolder(tmp_path / "out").run_name() != name


@pytest.mark.parametrize(("labels", "others"), [("a" * 32, "b" * 32), ("a" * 32, ""), ("", "a" * 32)])
def test_a_run_is_bound_to_its_labels(tmp_path: Path, labels: str, others: str) -> None:
    with enter(tmp_path) as run_folder:
        name = run_folder.run_name("images", "", labels)
        file = tmp_path / "checkpoints" / "run.json"
        before = file.read_bytes()
        with pytest.raises(InputError, match="private: has other labels than when the run in --out began; give the"):
            run_folder.run_name("images", "", others)
        assert file.read_bytes() == before
        # a count that looks at no label is bound to none
        assert name == run_folder.run_name("images", "", labels) == run_folder.run_name("images")
        # an older version wrote none down: the run is bound to those with which it goes on
        written = json.loads(before)
        assert written.pop("labels") == labels
        file.write_text(json.dumps(written))
        assert run_folder.run_name("images", "", others) == name
        with pytest.raises(InputError, match="other labels"):
            run_folder.run_name("images", "", labels)


def test_only_a_folder_that_this_run_began_is_discarded(tmp_path: Path) -> None:
    with enter(tmp_path / "out") as run_folder:
        pass
    with enter(tmp_path / "out", resume=True) as again:
        again.discard()
        assert (tmp_path / "out").exists()
    run_folder.discard()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("existed", [False, True])
def test_a_run_that_was_refused_before_it_wrote_anything_has_not_begun(tmp_path: Path, existed: bool) -> None:
    out = tmp_path / "out"
    if existed:
        out.mkdir()
    with pytest.raises(InputError, match="too few"), enter(out):
        raise InputError("public", "too few")
    assert [path.name for path in tmp_path.rglob("*")] == ["out"] * existed


@pytest.mark.parametrize("name", ["checkpoints/run.json", "checkpoints/denoiser.pt", "autoencoder"])
def test_what_a_refused_run_wrote_is_kept(tmp_path: Path, name: str) -> None:
    """Such as the name under which the ledger knows it."""
    with pytest.raises(InputError, match="too few"), enter(tmp_path / "out"):
        (tmp_path / "out" / name).touch()
        raise InputError("public", "too few")
    assert (tmp_path / "out" / name).exists()
    assert RunFolder(tmp_path / "out").earlier() is not None
    # nor is a run that was begun earlier discarded
    with enter(tmp_path / "other"):
        pass
    with pytest.raises(InputError, match="too few"), enter(tmp_path / "other", resume=True):
        raise InputError("public", "too few")
    assert RunFolder(tmp_path / "other").earlier() is not None


def test_leaving_removes_training_states_and_keeps_what_recognises_the_command(tmp_path: Path) -> None:
    with enter(tmp_path) as run_folder:
        run_folder.run_name()
        run_folder.checkpoint("denoiser").touch()
        (tmp_path / "checkpoints" / ".probe.pt.x").mkdir()
        run_folder.leave()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"manifest.json", "run.json", "lock"}
    with enter(tmp_path, resume=True):
        pass


def test_a_manifest_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "nowhere").earlier() is None
    with enter(tmp_path):
        pass
    (tmp_path / "checkpoints" / "manifest.json").write_text("{")
    assert RunFolder(tmp_path).earlier() is None


def test_an_earlier_run_is_known_by_its_request(tmp_path: Path) -> None:
    assert RunFolder(tmp_path / "out").earlier_with({}) is None
    request = {"settings": {"classes": ("a", "b")}, "base": None}
    with RunFolder.enter(tmp_path / "out", "train-private", request | {"budget": 1}, resume=False):
        pass
    found = RunFolder(tmp_path / "out").earlier_with(request)
    assert found is not None
    assert found["budget"] == 1
    assert RunFolder(tmp_path / "out").earlier_with(request | {"base": "other"}) is None
    assert RunFolder(tmp_path / "out").earlier_with(request | {"more": 1}) is None
