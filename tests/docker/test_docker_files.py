"""What docker/ says of the server is true, and so is what its files say of each other. Nothing is built."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement
from prometheus_client.parser import text_string_to_metric_families
from rapid_server.auth import OPEN_PATHS
from rapid_server.metrics import Metrics
from rapid_server.problems import KINDS
from rapid_server.schemas import OpenAIProblem, Problem
from rapid_server.settings import ServerSettings
from tests_support import module_of

from rapid.pictures import encode_png

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
KUBERNETES = DOCKER / "kubernetes"
FILES = sorted(path for path in DOCKER.rglob("*") if path.is_file())
INSTRUCTIONS = {
    *(
        "ARG",
        "CMD",
        "COPY",
        "ENTRYPOINT",
        "ENV",
        "EXPOSE",
        "FROM",
        "HEALTHCHECK",
        "RUN",
        "STOPSIGNAL",
        "USER",
        "WORKDIR",
    )
}
SERVER = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "server" / "rapid_server").glob("*.py")))

Instruction = tuple[str, str]


def instructions(path: Path) -> list[Instruction]:
    """The instructions of a Dockerfile and what they are given, on one line each."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    pairs = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    assert all(len(pair) == 2 for pair in pairs)
    return [(name, " ".join(value.split())) for name, value in pairs]


def last_stage(path: Path) -> list[Instruction]:
    found = instructions(path)
    start = max(place for place, (name, _) in enumerate(found) if name == "FROM")
    return found[start:]


def the_one(found: list[Instruction], name: str) -> str:
    (value,) = [value for key, value in found if key == name]
    return value


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    loaded = yaml.safe_load((DOCKER / name).read_text(encoding="utf-8"))
    assert isinstance(loaded, dict)
    return loaded


def kubernetes(name: str = "cpu/server.yaml") -> dict[str, dict[str, Any]]:
    parts = yaml.safe_load_all((KUBERNETES / name).read_text(encoding="utf-8"))
    return {part["kind"]: part for part in parts}


def pod_of(parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = parts["Deployment"]["spec"]["template"]["spec"]
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def help_of_serve() -> str:
    command = [sys.executable, "-m", "rapid", "serve", "--help"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.fixture(scope="module")
def replicas() -> ModuleType:
    return module_of(ROOT / "scripts" / "replicas.py")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
class TestDockerfile:
    def test_known_instructions_in_two_stages(self, path: Path) -> None:
        found = instructions(path)
        assert {name for name, _ in found} <= INSTRUCTIONS
        assert [value for name, value in found if name == "FROM"] == ["${PYTHON} AS build", "${PYTHON}"]

    def test_the_base_is_pinned(self, path: Path) -> None:
        base = next(value for name, value in instructions(path) if name == "ARG")
        assert re.fullmatch(r"PYTHON=python:3\.\d+\.\d+-slim-bookworm", base)

    def test_what_is_copied_is_there_and_sent(self, path: Path) -> None:
        sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
        copied = [value.split()[:-1] for name, value in instructions(path) if name == "COPY" and "--from" not in value]
        for source in (source for sources in copied for source in sources):
            assert (ROOT / source).exists()
            assert source in sent

    def test_every_package_of_the_project_is_copied(self, path: Path) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        folders = project["tool"]["setuptools"]["packages"]["find"]["where"]
        tops = {"rapid" if folder == "." else folder for folder in folders}
        copied = {value.split()[0] for name, value in instructions(path) if name == "COPY"}
        assert tops <= copied

    def test_runs_as_a_number_that_is_not_root(self, path: Path) -> None:
        assert the_one(last_stage(path), "USER") == "10001:10001"
        names = [name for name, _ in last_stage(path)]
        assert "COPY" not in names[names.index("USER") :]
        assert "RUN" not in names[names.index("USER") :]

    def test_what_it_starts(self, path: Path, help_of_serve: str) -> None:
        stage = last_stage(path)
        assert json.loads(the_one(stage, "ENTRYPOINT")) == ["rapid"]
        command = json.loads(the_one(stage, "CMD"))
        assert command == ["serve", "--model", "/model", "--host", "0.0.0.0"]
        assert all(word in help_of_serve for word in command if word.startswith("--"))
        assert the_one(stage, "STOPSIGNAL") == "SIGTERM"

    def test_watched_on_the_port_that_is_exposed(self, path: Path) -> None:
        stage = last_stage(path)
        port = the_one(stage, "EXPOSE")
        check = json.loads(the_one(stage, "HEALTHCHECK").split(" CMD ")[1])
        compile(check[2], "HEALTHCHECK", "exec")
        assert check[:2] == ["python", "-c"]
        assert f"'{port}'" in check[2]

    def test_pins_reach_pip(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        assert "--constraint constraints.txt" in text
        assert ("--constraint constraints-gpu.txt" in text) == path.name.startswith("gpu")
        for name in re.findall(r"grep '\^(\w+)=='", text):
            assert re.search(rf"^{name}==\d", (ROOT / "constraints.txt").read_text(), re.M)


def test_requirements_are_those_of_the_project() -> None:
    command = [sys.executable, str(DOCKER / "requirements.py"), str(ROOT / "pyproject.toml"), "cpu,serve"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    names = {re.split(r"[<>=]", line)[0] for line in lines}
    assert {"torch", "diffusers", "faiss-cpu", "fastapi", "uvicorn"} <= names
    assert not {"faiss-gpu", "pytest"} & names


def runs_on(wheel: dict[str, Any], capability: int) -> bool:
    """Whether a wheel has code for a GPU, by NVIDIA's rule of compatibility."""
    same = [have for have in wheel["sass"] if have // 10 == capability // 10 and have <= capability]
    return bool(same) or any(have <= capability for have in wheel["ptx"])


def fits(wheel: dict[str, Any], pins: dict[str, str]) -> bool:
    """Whether what a wheel requires is among the pinned versions, where these are pinned."""
    needed = [Requirement(line) for line in wheel["requires"]]
    return all(pins[one.name] in one.specifier for one in needed if one.name in pins)


def test_faiss_of_the_gpu_extra_runs_on_current_gpus_beside_torch() -> None:
    """By the recorded facts of the wheels; `A100, L40, H100 and H200, B200` have capabilities 80, 89, 90 and 100."""
    facts = json.loads((Path(__file__).parent / "faiss_wheels.json").read_text(encoding="utf-8"))
    wheels = {one["name"]: one for one in facts["wheels"]}
    files = (ROOT / "constraints.txt", DOCKER / "constraints-gpu.txt")
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    pins = dict(line.split("==") for line in lines if "==" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (chosen,) = [Requirement(line) for line in project["optional-dependencies"]["gpu"]]
    wheel = wheels[chosen.name]
    assert wheel["version"] in chosen.specifier
    assert pins[chosen.name] == wheel["version"]
    assert all(runs_on(wheel, capability) for capability in (70, 80, 89, 90, 100))
    assert wheel["avx512"]
    # the whole wheel is pinned, and by versions that it takes
    assert {Requirement(line).name for line in wheel["requires"]} <= pins.keys()
    assert fits(wheel, pins)
    # why not the others: no code for Hopper, another CUDA 13 than torch's
    assert not runs_on(wheels["faiss-gpu-cu12"], 90)
    assert not fits(wheels["faiss-gpu-cuvs"], pins)


def test_gpu_pins_are_exact_and_no_second_opinion() -> None:
    def names(path: Path) -> list[str]:
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
        return [line.split("==")[0].lower().replace("_", "-") for line in lines]

    assert not set(names(DOCKER / "constraints-gpu.txt")) & set(names(ROOT / "constraints.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_settings_exist(path: Path) -> None:
    known = {name.upper() for name in ServerSettings.model_fields} | {"SETTINGS"}
    assert set(re.findall(r"RAPID_SERVE_([A-Z_]+)", path.read_text(encoding="utf-8"))) <= known


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_paths_exist(path: Path) -> None:
    for asked in re.findall(r"/(?:readyz|healthz|metrics|generate|info)\b", path.read_text(encoding="utf-8")):
        assert f'"{asked}"' in SERVER


def test_compose_shuts_everything_that_is_not_needed() -> None:
    for name, service in compose()["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}, name
        assert all(volume["read_only"] for volume in service["volumes"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


def test_compose_fits_the_other_files() -> None:
    services, port = compose()["services"], the_one(last_stage(DOCKERFILES[0]), "EXPOSE")
    rapid, balancer = services["rapid"], services["balancer"]
    assert rapid["expose"] == [port]
    assert f":{port}/readyz" in rapid["healthcheck"]["test"][-1]
    assert rapid["volumes"][0]["target"] == "/model"
    assert rapid["environment"]["RAPID_SERVE_SETTINGS"] == f"/run/secrets/{rapid['secrets'][0]['target']}"
    config = (DOCKER / "nginx.conf").read_text(encoding="utf-8")
    assert f"server rapid:{port} resolve" in config
    listened = re.findall(r"listen (\d+);", config)
    assert [balancer["ports"][0].split(":")[-1]] == listened
    most = re.findall(r"client_max_body_size (\d+)m;", config)
    assert [int(most[0]) << 20] == [ServerSettings.model_fields["max_body_bytes"].default]
    assert f":{listened[0]}/readyz" in balancer["healthcheck"]["test"][-1]
    for name in ("compose.yaml", "compose.gpu.yaml"):
        assert (DOCKER / compose(name)["services"]["rapid"]["build"]["context"]).resolve() == ROOT
        assert (ROOT / compose(name)["services"]["rapid"]["build"]["dockerfile"]).is_file()


def test_what_the_balancer_answers_itself_has_the_form_of_the_path() -> None:
    """As the server's own errors, under `/v1` and elsewhere."""
    config = (DOCKER / "nginx.conf").read_text(encoding="utf-8")
    maps = re.findall(r"map \$request_uri \$(\w+) \{\s+default '(.*)';\s+(\S+) '(.*)';\s+\}", config)
    assert {name for name, *_ in maps} == set(re.findall(r"return \d+ \$(\w+);", config)) and len(maps) == 5
    for _, plain, path, openai in maps:
        assert all(re.match(path[1:], uri) for uri in ("/v1", "/v1/models", "/v1?a=b"))
        assert not any(re.match(path[1:], uri) for uri in ("/v11", "/a/v1"))
        detail, error = Problem.model_validate_json(plain).detail, OpenAIProblem.model_validate_json(openai).error
        assert detail == error.message
        assert error.type in {kind for kind, _ in KINDS.values()}


def test_kubernetes_fits_the_other_files() -> None:
    parts = kubernetes()
    pod = pod_of(parts)
    (container,) = pod["containers"]
    stage = last_stage(DOCKER / "cpu.Dockerfile")
    user, group = map(int, the_one(stage, "USER").split(":"))
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (user, group)
    assert container["args"] == json.loads(the_one(stage, "CMD"))
    assert container["ports"][0]["containerPort"] == int(the_one(stage, "EXPOSE"))
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    labels = parts["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels == parts["Service"]["spec"]["selector"]
    assert labels == parts["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    assert pod["enableServiceLinks"] is False  # see the comment there
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/readyz", "port": container["ports"][0]["name"]}
    assert container["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_kubernetes_on_gpus(help_of_serve: str) -> None:
    base, patch = kubernetes(), kubernetes("gpu/gpu.yaml")
    assert list(patch) == ["Deployment"]
    assert patch["Deployment"]["metadata"]["name"] == base["Deployment"]["metadata"]["name"]
    (container,), (of_base,) = pod_of(patch)["containers"], pod_of(base)["containers"]
    assert container["name"] == of_base["name"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert "nvidia.com/gpu" not in of_base["resources"]["limits"]
    command = json.loads(the_one(last_stage(DOCKER / "gpu.Dockerfile"), "CMD"))
    assert container["args"][: len(command)] == of_base["args"] == command
    assert all(word in help_of_serve for word in container["args"] if word.startswith("--"))
    assert patch["Deployment"]["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0  # no GPU is free for it


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_kustomizations(name: str) -> None:
    folder = KUBERNETES / name
    parts = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    named = [*parts["resources"], *(patch["path"] for patch in parts.get("patches", ()))]
    assert all((folder / path).exists() for path in named)
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    command = [kubectl, "kustomize", str(folder)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    built = {part["kind"]: part for part in yaml.safe_load_all(text)}
    assert set(built) == {"Deployment", "Service", "PodDisruptionBudget", "HorizontalPodAutoscaler"}
    (container,) = pod_of(built)["containers"]
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (name == "gpu") == (":gpu-" in container["image"])
    assert container["resources"]["limits"]["memory"] == "6Gi"
    assert container["readinessProbe"]["httpGet"]["path"] == "/readyz"


def test_replicas_follow_a_metric_of_the_server() -> None:
    metrics = Metrics()
    metrics.watch_queue(lambda: 3, lambda: 1.5)
    text = bytes(metrics.response().body).decode()
    found = {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}
    scaler = kubernetes("cpu/scaling.yaml")["HorizontalPodAutoscaler"]["spec"]
    (asked,) = scaler["metrics"]
    assert asked["type"] == "Pods"
    assert asked["pods"]["metric"]["name"] in found
    values = yaml.safe_load((KUBERNETES / "metrics/adapter-values.yaml").read_text(encoding="utf-8"))
    (rule,) = values["rules"]["custom"]
    assert rule["name"]["as"] == asked["pods"]["metric"]["name"]
    assert rule["seriesQuery"].split("{")[0] in found
    parts = kubernetes()
    deployment = parts["Deployment"]
    target = {"apiVersion": deployment["apiVersion"], "kind": "Deployment", "name": deployment["metadata"]["name"]}
    assert scaler["scaleTargetRef"] == target
    assert "replicas" not in deployment["spec"]  # applied again, it would undo what the autoscaler did
    assert 1 <= scaler["minReplicas"] < scaler["maxReplicas"]
    monitor = kubernetes("metrics/pod-monitor.yaml")["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"] == deployment["spec"]["template"]["metadata"]["labels"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in pod_of(parts)["containers"][0]["ports"]]
    assert endpoint["path"] not in OPEN_PATHS
    assert endpoint["authorization"]["credentials"]


def test_who_stops_the_server_waits_for_it() -> None:
    grace = ServerSettings.model_fields["grace_seconds"].default + 5
    assert int(compose()["services"]["rapid"]["stop_grace_period"].removesuffix("s")) >= grace
    pod = pod_of(kubernetes())
    leaving = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] >= grace + leaving


def test_readme_names_every_file() -> None:
    text = (DOCKER / "README.md").read_text(encoding="utf-8")
    assert not [path.name for path in FILES if path.name not in text and path.name != "README.md"]


class TestReplicas:
    def test_the_configuration_is_derived(self, replicas: ModuleType, tmp_path: Path) -> None:
        config = (DOCKER / "nginx.conf").read_text(encoding="utf-8")
        derived = replicas.derive(config, tmp_path, 8123, ["127.0.0.1:1001", "127.0.0.1:1002"])
        assert re.findall(r"^ *server (\S+) max_fails=0;$", derived, re.M) == ["127.0.0.1:1001", "127.0.0.1:1002"]
        assert re.findall(r"^ *(?:resolver .*|server .* resolve.*)$", derived, re.M) == []
        assert "listen 127.0.0.1:8123;" in derived
        retry = re.search("proxy_next_upstream .*;", config)
        assert retry is not None
        assert retry.group() in derived
        assert f"pid {tmp_path}/nginx.pid;" in derived
        nginx = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin")
        if nginx is not None:
            (tmp_path / "nginx.conf").write_text(derived, encoding="utf-8")
            command = [nginx, "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-e", "stderr"]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
            assert done.returncode == 0, done.stderr

    def test_a_changed_configuration_is_told(self, replicas: ModuleType, tmp_path: Path) -> None:
        with pytest.raises(replicas.ReplicasError, match="has nothing like"):
            replicas.derive("http {}", tmp_path, 8123, [])

    def test_no_nginx_is_one_clear_line(
        self,
        replicas: ModuleType,
        private_bundle: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
        monkeypatch.setattr(sys, "argv", ["replicas", "--model", str(private_bundle)])
        assert replicas.main() == 2
        assert capsys.readouterr().err == "replicas: nginx is not installed: apt install nginx-light\n"

    def test_answers_are_compared(self, replicas: ModuleType) -> None:
        def answer(*pixels: int, seed: int = 1) -> dict[str, Any]:
            image = np.array([pixels], dtype=np.uint8)
            return {"images": [base64.b64encode(encode_png(image)).decode()], "labels": ["a"], "seed": seed}

        assert replicas.compare(answer(0, 255), answer(1, 254)) is None
        assert replicas.compare(answer(0, 255), answer(0, 253)) == "a pixel differs by 2"
        assert replicas.compare(answer(0, 255), answer(255, 0)) == "a pixel differs by 255"
        assert replicas.compare(answer(0, 255, seed=2), answer(0, 255)).endswith("seed 2 instead of ['a'], 1")
        assert replicas.compare(answer(0, 255), answer(0)) == "shape (1, 2) instead of (1, 1)"
        assert replicas.compare(answer(0) | {"images": []}, answer(0)) == "0 images instead of 1"
