"""Scripts as processes: bad input is one line and exit code 2, and a folder keeps the arguments it was begun with."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tests_process

ROOT = Path(__file__).parents[2]


def failed(script: str, *arguments: object) -> str:
    """What a script says that ends with exit code 2; `-W error` as in tests."""
    found = tests_process.run(
        *map(str, arguments), env=os.environ | {"PYTHONPATH": str(ROOT)}, script=ROOT / "scripts" / script
    )
    assert found.returncode == 2, found.stderr
    return found.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("sweep_sampling.py", "--model {no} --test {digits} --out {out}", "sweep-sampling: --model {no}: is not a fo"),
        ("sweep_private.py", "{no} --data {no}", "sweep-private: {no}: cannot be read (No such file"),
        ("export_networks.py", "--base {no} --out {out} --card {no}", "export-networks: --base {no}: is not a folder"),
        ("export_networks.py", "--base {base} --out {out} --card {no}", "export-networks: {no}: No such file"),
        ("export_networks.py", "--base {base} --out {digits} --card {digits}", "--card {digits}: is no text"),
        ("bench_dp_step.py", "--device nope", "bench-dp-step: --device nope: "),
        ("soak.py", "--model {no}", "soak: --model {no}: is not a folder"),
        ("replicas.py", "--model {no}", "replicas: --model {no}: is not a folder"),
        ("replicas.py", "--model {no} --out {base}", "replicas: --out {base}: is a folder"),
        ("bench_serve.py", "--model {no}", "bench-serve: --model {no}: is not a folder"),
    ],
)
def test_one_line(script: str, arguments: str, words: str, digits: Path, public_bundle: Path, tmp_path: Path) -> None:
    places = {"no": tmp_path / "nowhere", "digits": digits, "base": public_bundle, "out": tmp_path / "out"}
    told = failed(script, *arguments.format(**places).split())
    assert told.count("\n") == 1
    assert words.format(**places) in told


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("soak.py", "--model no --minutes 0", "argument --minutes: must be at least 0.05"),
        ("replicas.py", "--model no --requests nan", "argument --requests: invalid int value: 'nan'"),
        ("replicas.py", "--model no --seconds inf", "argument --seconds: must be at least 0.5, and finite: inf"),
    ],
)
def test_numbers_that_measure_nothing(script: str, arguments: str, words: str) -> None:
    assert words in failed(script, *arguments.split()).splitlines()[-1]


STUDY = """
preset: letters-mnist
public: [digits]
private: digits
epsilon: 8
images: 60
studies: {few: [[generation.steps=4]]}
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("epsilon: 8", "", "epsilon: Field required"),
        ("epsilon: 8", "epsilon: 0", "epsilon: must be more than 0"),
        ("epsilon: 8", "repeated: [many]", "repeated names many"),
        ("images: 60", "images: 60\nimages: 70", "'images' stands twice"),
        ("images: 60", "images: 60\nimage: 70", "image: there is no such setting"),
        ("[digits]", "[letters]", "--data {data}: has no letters.npz"),
        ("steps=4", "steps=0", "generation.steps"),
        (STUDY, "[1, 2]", "must hold a study such as"),
        (STUDY, "a: b: c", "is not valid YAML"),
    ],
)
def test_a_study_that_is_none(old: str, new: str, words: str, digits: Path, tmp_path: Path) -> None:
    """Told before anything is trained."""
    study, data = tmp_path / "study.yaml", digits.parent
    assert digits.name == "digits.npz"
    study.write_text(STUDY.replace(old, new) + ("epsilon: 8\n" if "many" in new else ""))
    told = failed("sweep_private.py", study, "--data", data, "--out", tmp_path / "out")
    assert told.count("\n") == 1
    assert words.format(data=data) in told
    # so that the mended one may use it
    assert not (tmp_path / "out").exists()


def test_figures_keep_their_arguments(digits: Path, private_bundle: Path, tmp_path: Path) -> None:
    """The folder of an earlier run with other images."""
    (tmp_path / "arguments.json").write_text('{"model": "another", "count": 8000, "seed": 0}')
    told = failed("sweep_sampling.py", "--model", private_bundle, "--test", digits, "--out", tmp_path)
    assert "--out" in told
    assert "was begun with model another, and now it is" in told
    assert [path.name for path in tmp_path.iterdir()] == ["arguments.json"]
