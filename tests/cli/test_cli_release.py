"""`rapid release` as a user meets it: a report that passes and its checks, refusals, bad input."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from tests_process import run

import rapid
from rapid.cli import main
from rapid.data import sample_path
from rapid.dp.events import poisson_gaussian_steps
from rapid.dp.ledger import Ledger, default_path
from rapid.dp.spending import balance
from rapid.errors import PrivacyRefused
from rapid.release import read_public_key, verify

LOOSE = """
max_epsilon: 10
max_delta: 0.01
unit: one image
ledger: {max_epsilon: null}
copies: {epsilon: 8, max_share: 0.2, min_synthetic: 20, reference_share: 0.05}
membership: {max_advantage: 0.99, false_positive_rates: [0.1]}
"""
TESTS = [
    {"subject": "late steps", "test": f"late steps: {test}", "p_value": 0.5, "observed": 1.0, "detects": 0.02}
    for test in ("noise: scale", "one example")
]
AUDIT = {
    "rapid": rapid.__version__, "refuted": False, "claimed": 1.0, "delta": 1e-5, "bound": 0.0, "conclusive": True,
    "noise_multiplier": 1.0, "sample_rate": 0.25,
    "step_tests": {"findings": TESTS, "seconds": 1.0, "false_alarm": 0.001},
}  # fmt: skip


class Given(NamedTuple):
    """The files of a release."""

    root: Path
    model: Path
    key: Path
    arguments: list[object]

    @property
    def public(self) -> Path:
        return self.key.with_suffix(".pub")

    def quick(self, private: Path, out: Path, *more: object, policy_words: str = LOOSE) -> list[str]:
        """A command without canaries and audit."""
        policy = self.root / "quick.yaml"
        optional = "audit: {required: false}\n" + policy_words.replace(
            "membership: {", "membership: {required: false, "
        )
        policy.write_text(optional)
        command = ["release", "--model", self.model, "--policy", policy, "--key", self.key, "--private", private]
        return [str(word) for word in (*command, "--public", self.root / "others.npz", "--out", out, *more)]


def failed_rules(out: Path) -> set[str]:
    return {rule["name"] for rule in json.loads((out / "report.json").read_text())["rules"] if rule["stops"]}


def subset(path: Path, start: int, stop: int) -> Path:
    with np.load(sample_path("digits")) as digits:
        np.savez(
            path, images=digits["images"][start:stop], labels=digits["labels"][start:stop], classes=digits["classes"]
        )
    return path


@pytest.fixture(scope="module")
def given(private_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Given:
    """The tiny model without its training state, a policy, canaries, an audit and a key."""
    root = tmp_path_factory.mktemp("release")
    model = Path(shutil.copytree(private_bundle, root / "model", ignore=shutil.ignore_patterns("checkpoints")))
    (root / "policy.yaml").write_text(LOOSE)
    (root / "audit.json").write_text(json.dumps(AUDIT))
    made = run("release", "--new-key", root / "key.pem")
    assert made.returncode == 0, made.stderr
    arguments = ["--model", model, "--policy", root / "policy.yaml", "--key", root / "key.pem"]
    arguments += ["--audit", root / "audit.json", "--members", subset(root / "members.npz", 0, 20)]
    arguments += ["--non-members", subset(root / "others.npz", 200, 260)]
    return Given(root, model, root / "key.pem", arguments)


@pytest.fixture(scope="module")
def smiths(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The private images as files with names: the same data set for the ledger."""
    root = tmp_path_factory.mktemp("private") / "clinic"
    with np.load(digits) as archive:
        for number, (image, label) in enumerate(zip(archive["images"], archive["labels"], strict=True)):
            folder = root / str(archive["classes"][label])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"smith{number}.png")
    return root


class Passed(NamedTuple):
    out: Path
    done: CompletedProcess[str]
    content: dict[str, Any]
    lines: int
    """Of the ledger, before."""


@pytest.fixture(scope="module")
def passed(given: Given, smiths: Path) -> Passed:
    before = len(Ledger(default_path()).entries())
    out = given.root / "report"
    done = run("release", *given.arguments, "--private", smiths, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    return Passed(out, done, json.loads((out / "report.json").read_text()), before)


def refused(given: Given, out: Path, *more: object) -> str:
    """The one line of a check that fails with exit code 3."""
    done = run("release", "--verify", out, "--public-key", given.public, *more)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_a_model_within_the_policy(given: Given, passed: Passed) -> None:
    content = passed.content
    assert content["outcome"] == "pass"
    assert {rule["outcome"] for rule in content["rules"]} == {"pass"}
    names = {rule["name"] for rule in content["rules"]}
    assert {"epsilon", "ledger", "ledger-run", "audit", "membership", "near-copies", "contents"} <= names
    statement = json.loads((given.model / "privacy.json").read_text())
    assert content["privacy"]["statement"] == statement
    assert all(
        abs(one - statement["epsilon"]) < 0.3 for one in content["privacy"]["recomputed"]["accountants"].values()
    )
    page = (passed.out / "report.html").read_text()
    assert "The policy is met" in page
    assert "is not known to hold for" not in page
    assert {run["unit"] for run in content["ledger"]["runs"]} == {"one image"}
    assert "What is not guaranteed" in page
    assert not re.search(r"(src|href)=", page)
    fingerprint = re.findall(r"\b[0-9a-f]{64}\b", passed.done.stdout)[-1]
    assert content["signed_with"] == fingerprint
    assert fingerprint in page
    # bound to its bundle
    assert content["model"]["components"] == json.loads((given.model / "config.json").read_text())["components"]


def test_nothing_private_but_the_count_leaves(passed: Passed) -> None:
    written = "".join(path.read_text() for path in passed.out.iterdir() if path.suffix in (".json", ".html"))
    for text in (written, passed.done.stdout, passed.done.stderr):
        assert "smith" not in text
        assert "clinic" not in text


def test_the_count_is_charged(passed: Passed) -> None:
    copies = passed.content["copies"]
    entries = Ledger(default_path()).entries()[passed.lines :]
    own = [entry for entry in entries if any(one.name == "near-copies" for one in entry.releases)]
    assert [entry.kind for entry in own[:4]] == ["reserve", "spend", "spend", "settle"]
    (row,) = poisson_gaussian_steps(own[0].releases[0].dp_event)
    assert row == (copies["noise_stddev"], 1.0, 1)
    assert 7.9 < copies["epsilon"] <= 8
    assert copies["epsilon_with_model"] > max(copies["epsilon"], passed.content["privacy"]["statement"]["epsilon"])
    assert own[0].run in {one["run"] for one in passed.content["ledger"]["runs"]}


def test_again_with_resume_costs_nothing(given: Given, passed: Passed, smiths: Path) -> None:
    ledger = Ledger(default_path())
    dataset = passed.content["ledger"]["dataset"]
    before = balance(ledger.entries(), dataset).epsilon_prv
    command = ["release", *given.arguments, "--private", smiths, "--out"]
    unasked = run(*command, passed.out)
    assert unasked.returncode == 2
    assert "continue with --resume or give a new folder" in unasked.stderr
    again = run(*command, passed.out, "--resume")
    assert again.returncode == 0, again.stderr
    assert json.loads((passed.out / "report.json").read_text())["copies"] == passed.content["copies"]
    assert balance(ledger.entries(), dataset).epsilon_prv == pytest.approx(before)


def test_a_forged_count_is_not_used(
    given: Given, passed: Passed, smiths: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(passed.out, tmp_path / "report"))
    # a copy of the folder has the count, too
    assert main(given.quick(smiths, copy, "--resume")) == 0
    assert json.loads((copy / "report.json").read_text())["copies"] == passed.content["copies"]
    file = copy / "checkpoints" / "near-copies.pt"
    state = torch.load(file)
    torch.save(state | {"result": torch.zeros(1, dtype=torch.float64)}, file)
    assert main(given.quick(smiths, copy, "--resume")) == 2
    assert "is not a count that the ledger knows; remove it to count again" in capfd.readouterr().err


def test_a_count_of_other_images_is_told_before_they_are_drawn(
    given: Given, passed: Passed, smiths: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(passed.out, tmp_path / "report"))
    for flag, value, was in (("--seed", "1", " (0)"), ("--count", "21", " (20)"), ("--synthetic", str(smiths), "")):
        assert main(given.quick(smiths, copy, "--resume", flag, value)) == 2
        told = capfd.readouterr().err
        assert told.startswith(f"rapid: {flag} {value}: differs from that of the near-copies in --out{was}; give the")
    (copy / "checkpoints" / "near-copies.json").unlink()
    assert main(given.quick(smiths, copy, "--resume", "--seed", "1")) == 2
    assert "or another epsilon; give the same --synthetic, --seed, --count" in capfd.readouterr().err


def test_a_report_is_checked(given: Given, passed: Passed, tmp_path: Path) -> None:
    done = run("release", "--verify", passed.out, "--public-key", given.public, "--model", given.model,
               "--policy", given.root / "policy.yaml")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "genuine" in done.stdout
    assert passed.content["signed_with"] in done.stdout
    copy = Path(shutil.copytree(passed.out, tmp_path / "report"))
    report = (copy / "report.json").read_bytes()
    # one digit, or one space
    for changed in (report.replace(b'"delta":0.', b'"delta":1.', 1), report + b" ", b""):
        assert changed != report
        (copy / "report.json").write_bytes(changed)
        assert "the signature is not that of this report by this key" in refused(given, copy)
    (copy / "report.json").write_bytes(report)
    (copy / "report.html").write_text("<p>The policy is met.")
    assert "report.html is not the page of this report" in refused(given, copy)
    (copy / "report.json.sig").unlink()
    assert run("release", "--verify", copy, "--public-key", given.public).returncode == 2


def test_another_key_bundle_or_policy_is_refused(given: Given, passed: Passed, tmp_path: Path) -> None:
    assert main(["release", "--new-key", str(tmp_path / "other.pem")]) == 0
    other = Given(given.root, given.model, tmp_path / "other.pem", [])
    assert "by this key" in refused(other, passed.out)
    model = Path(shutil.copytree(given.model, tmp_path / "model"))
    weights = model / "denoiser" / "diffusion_pytorch_model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (model / "smith.png").write_bytes(b"private")
    told = refused(given, passed.out, "--model", model)
    assert "1 files of --model are not those of the report, the first is denoiser/" in told
    assert "--model has 1 files that the report does not have" in told
    assert "smith" not in told
    key = read_public_key(given.public)
    strict = tmp_path / "strict.yaml"
    strict.write_text("max_epsilon: 1")
    assert "it was made by another policy" in refused(given, passed.out, "--policy", strict)
    assert verify(passed.out, key, given.model).files == len(passed.content["model"]["files"])
    with pytest.raises(PrivacyRefused, match="it expired"):
        verify(passed.out, key, now=datetime.now(UTC) + timedelta(days=366))


def test_above_the_policy(given: Given, passed: Passed, smiths: Path, tmp_path: Path) -> None:
    """Refused and reported; what was not measured is no pass, and nothing is spent."""
    before = len(Ledger(default_path()).entries())
    strict = tmp_path / "strict.yaml"
    strict.write_text("audit: {required: false}\ncopies: {min_synthetic: 20}")
    done = run("release", "--model", given.model, "--policy", strict, "--key", given.key, "--private", smiths,
               "--public", given.root / "others.npz", "--out", tmp_path / "report", "--count", 20,
               )  # fmt: skip
    assert done.returncode == 2
    assert "--public: 60 images; the distance of near-copies needs 100 or more" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "report").exists()
    command = ["release", "--model", given.model, "--policy", strict, "--key", given.key, "--private", smiths]
    done = run(*command, "--out", tmp_path / "out")
    assert done.returncode == 3
    failed = {"epsilon", "delta", "unit", "ledger-total", "membership", "membership-advantage", "near-copies"}
    names = re.search(r"the policy is not met: ([^;]*);", done.stderr.splitlines()[-1])
    assert names is not None
    assert set(names[1].split(", ")) == failed
    content = json.loads((tmp_path / "out" / "report.json").read_text())
    assert content["outcome"] == "fail"
    rules = {rule["name"]: rule for rule in content["rules"]}
    assert {name for name, rule in rules.items() if rule["stops"]} == failed
    assert rules["membership"]["outcome"] == rules["near-copies"]["outcome"] == "not measured"
    assert rules["audit"] | {"found": ""} == rules["audit"] | {"found": "", "outcome": "not measured", "stops": False}
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Do not release this model" in page
    assert "This is not known to hold for one person" in page
    assert len(Ledger(default_path()).entries()) == before
    # genuine, but no permission
    assert "the report says that the policy is not met: " in refused(given, tmp_path / "out")


def test_planted_near_copies_are_found(
    given: Given, passed: Passed, smiths: Path, digits: Path, tmp_path: Path
) -> None:
    """The same release with a synthetic set that holds the private images."""
    with np.load(digits) as archive:
        np.savez(tmp_path / "leak.npz", images=archive["images"])
    code = main(given.quick(smiths, tmp_path / "out", "--synthetic", tmp_path / "leak.npz"))
    assert (code, failed_rules(tmp_path / "out")) == (3, {"near-copies"})
    found = json.loads((tmp_path / "out" / "report.json").read_text())["copies"]
    assert found["count"] > 90
    assert passed.content["copies"]["count"] < 50
    assert not found["synthetic_drawn"]


def test_a_count_that_cannot_pass_is_not_made(given: Given, smiths: Path, tmp_path: Path) -> None:
    def rules_with(out: Path, *changes: tuple[str, str]) -> dict[str, Any]:
        words = LOOSE
        for change in changes:
            words = words.replace(*change)
        assert main(given.quick(smiths, out, policy_words=words)) == 3
        return {rule["name"]: rule for rule in json.loads((out / "report.json").read_text())["rules"]}

    before = len(Ledger(default_path()).entries())
    blurred = rules_with(tmp_path / "blurred", ("epsilon: 8", "epsilon: 0.01"))
    assert {name for name, rule in blurred.items() if rule["stops"]} == {"near-copies"}
    assert "noise alone may be" in blurred["near-copies"]["found"]
    # the least limit, to a tenth, that all releases so far keep
    least = json.loads((tmp_path / "blurred" / "report.json").read_text())["ledger"]["epsilon_prv"]
    number, rules = 0, dict[str, Any]()
    while not rules or rules["ledger-total"]["stops"]:
        most = ("max_epsilon: null", f"max_epsilon: {least * 1.1**number}")
        rules = rules_with(tmp_path / str(number), ("epsilon: 8", "epsilon: 100"), most)
        number += 1
    assert {name for name, rule in rules.items() if rule["stops"]} == {"near-copies"}
    assert "with the count, all releases together would spend more than" in rules["near-copies"]["found"]
    assert len(Ledger(default_path()).entries()) == before


def test_a_spent_limit_or_an_altered_ledger(given: Given, passed: Passed, smiths: Path, tmp_path: Path) -> None:
    for end in ("", ".key", ".head"):
        shutil.copy(f"{default_path()}{end}", tmp_path / f"ledger.jsonl{end}")
    ledger = tmp_path / "ledger.jsonl"
    assert main(["ledger", "limit", str(smiths), "--epsilon", "1", "--delta", "1e-5", "--ledger", str(ledger)]) == 0
    done = run(*given.quick(smiths, tmp_path / "limited", "--ledger", ledger))
    assert done.returncode == 3
    assert "the limit of this data set is epsilon 1" in done.stderr
    rules = {rule["name"]: rule for rule in json.loads((tmp_path / "limited" / "report.json").read_text())["rules"]}
    assert rules["near-copies"]["found"] == "the ledger does not admit the count"
    assert {name for name, rule in rules.items() if rule["stops"]} == {"near-copies"}
    ledger.write_text(ledger.read_text().replace('"epsilon": 1.0', '"epsilon": 9.0', 1))
    assert main(given.quick(smiths, tmp_path / "altered", "--ledger", ledger)) == 3
    assert failed_rules(tmp_path / "altered") == {"ledger", "ledger-run", "near-copies"}


def test_other_images_of_the_same_number_are_not_in_the_ledger(given: Given, tmp_path: Path) -> None:
    """The model's run is not charged to them, so nothing is counted."""
    assert main(given.quick(subset(tmp_path / "x.npz", 300, 400), tmp_path / "out")) == 3
    assert failed_rules(tmp_path / "out") == {"ledger-run", "near-copies"}


REPORT = "--model {model} --policy {root}/policy.yaml --out {new}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "--model: is missing"),
        ("--model {model} --policy {root}/policy.yaml", "--out: is missing"),
        (REPORT, "--key: the policy wants a signed report"),
        (f"{REPORT} --key {{root}}/audit.json", "chmod 600"),
        (f"{REPORT} --key {{key}} --public-key {{root}}/key.pub", "--public-key: is for --verify"),
        (f"{REPORT} --key {{key}} --members {{root}}/members.npz", "--non-members: attacks need both"),
        (
            f"{REPORT} --key {{key}} --members {{root}}/bare.npz --non-members {{root}}/others.npz",
            "--members {root}/bare.npz: has no labels, and the other set of canaries has",
        ),
        (f"{REPORT} --key {{key}} --epsilon 9", "at most the policy's copies.epsilon, 8"),
        (f"{REPORT} --key {{key}} --epsilon nan", "at most the policy's copies.epsilon, 8"),
        (f"{REPORT} --key {{key}} --count 19", "--count 19: the policy wants at least 20"),
        (f"{REPORT} --key {{key}} --synthetic {{root}}/few.npz", "has 19 images; the policy wants at least 20"),
        (f"{REPORT} --key {{key}} --private {{root}}/others.npz", "has 60 images, and the model was trained on 100"),
        (
            f"{REPORT} --key {{key}} --private {{root}}/others.npz --unit-column labels",
            "the unit of the model is one im",
        ),
        (f"{REPORT} --key {{key}} --audit {{root}}/policy.yaml", "is not what rapid audit --json prints"),
        ("--model {model} --policy {root}/policy.yaml --key {key} --out {model}/report", "lies in the bundle"),
        ("--model {public} --policy {root}/policy.yaml --key {key} --out {new}", "is a public bundle"),
        ("--model {model} --policy {root}/none.yaml --key {key} --out {new}", "cannot be read"),
        ("--verify {root} --public-key {root}/key.pub", "has no report (report.json)"),
        ("--verify {root}", "--public-key: is missing"),
        ("--verify {root} --public-key {root}/key.pub --out {new}", "--out: does not go with --verify"),
        ("--new-key {key}", "no key is overwritten"),
        ("--new-key {new} --policy {root}/policy.yaml", "--policy: does not go with --new-key"),
    ],
)
def test_bad_input(
    arguments: str, words: str, given: Given, public_bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with np.load(subset(given.root / "few.npz", 0, 19)) as few:
        np.savez(given.root / "bare.npz", images=few["images"])
    places = {"root": given.root, "model": given.model, "key": given.key, "new": tmp_path / "new"}
    assert main(["release", *arguments.format(**places, public=public_bundle).split()]) == 2
    shown = capfd.readouterr().err
    assert words.format(root=given.root) in shown
    assert shown.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert not (tmp_path / "new.pub").exists()
