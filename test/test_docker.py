"""Image, compose file and manifests: as far as they can be checked where no container engine and no cluster is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_adapt.front.asgi import STOP_GRACE_S
from sglang_adapt.front.flags import split_argv
from sglang_adapt.version import __version__

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"


def dockerfile() -> str:
    return (DOCKER / "Dockerfile").read_text()


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    return found


def manifests() -> dict[str, dict[str, Any]]:
    """By kind."""
    files = sorted((DOCKER / "k8s").glob("*.yaml"))
    return {entry["kind"]: entry for file in files for entry in yaml.safe_load_all(file.read_text())}


def test_hadolint_has_nothing_to_say() -> None:
    binary = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if binary is None:
        pytest.skip("hadolint is not installed (the test extra)")
    run = subprocess.run([binary, str(DOCKER / "Dockerfile")], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout


def test_the_image_has_the_pinned_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = dict(line.split("==") for line in project["dependencies"] if "==" in line)
    assert f"FROM lmsysorg/sglang:v{pins.pop('sglang')}\n" in dockerfile()
    del pins["torch"]
    assert dict(re.findall(r" ([\w-]+)==([\w.]+)", dockerfile())) == pins


def test_the_image_is_not_run_as_root_and_gets_what_it_copies() -> None:
    assert re.findall(r"^USER (.*)$", dockerfile(), re.M) == ["10001:10001"]
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {part for line in re.findall(r"^COPY (.*) \S+$", dockerfile(), re.M) for part in line.split()}
    assert copied == let_in
    assert all((ROOT / part).exists() for part in copied)


def test_manifests_are_valid() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed (the test extra)"
    )
    found = manifests()
    assert set(found) == {"Service", "StatefulSet", "ServiceMonitor", "PrometheusRule"}
    for kind in ("Service", "StatefulSet"):
        validate.validate(found[kind], "1.37", strict=True)


def test_the_monitor_finds_the_service() -> None:
    """A ServiceMonitor is not in Kubernetes' schema."""
    found = manifests()
    monitor, service = found["ServiceMonitor"], found["Service"]
    assert set(monitor) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(monitor["spec"]) == {"selector", "endpoints"}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"


def test_alerts_are_the_same_on_kubernetes_and_name_what_is_scraped() -> None:
    rules = manifests()["PrometheusRule"]
    groups = yaml.safe_load((DOCKER / "monitoring" / "alerts.yml").read_text())["groups"]
    assert rules["apiVersion"] == "monitoring.coreos.com/v1" and rules["spec"] == {"groups": groups}
    jobs = {job for group in groups for rule in group["rules"] for job in re.findall(r'job="(\w+)"', rule["expr"])}
    (scraped,) = yaml.safe_load((DOCKER / "monitoring" / "prometheus.yml").read_text())["scrape_configs"]
    (endpoint,) = manifests()["ServiceMonitor"]["spec"]["endpoints"]
    assert jobs == {scraped["job_name"]}
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": scraped["job_name"]}]


def test_a_pod_is_probed_and_drained_as_the_server_does_it() -> None:
    found = manifests()
    pod = found["StatefulSet"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert probes == {"startup": "/health", "readiness": "/ready", "liveness": "/health"}
    ours, _ = split_argv(container["args"])
    assert pod["spec"]["terminationGracePeriodSeconds"] > ours.adapt_drain_timeout + STOP_GRACE_S
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert max(map(int, ours.adapt_tp_sizes.split(","))) <= gpus
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    claims = {claim["metadata"]["name"] for claim in found["StatefulSet"]["spec"]["volumeClaimTemplates"]}
    assert mounts == {volume["name"] for volume in pod["spec"]["volumes"]} | claims
    assert container["image"].endswith(f":{__version__}")


def test_the_compose_file_holds_together() -> None:
    """What `docker compose config` does not say: that files, image versions, ports and our flags fit."""
    found = compose()
    assert set(found["services"]) == {"server", "prometheus", "grafana"}
    for name, service in found["services"].items():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert (DOCKER / source).exists() if source.startswith(".") else source in found["volumes"], (name, source)
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        # What others have made is the same bytes each time; ours is built here.
        digest = "" if "build" in service else "@sha256:[0-9a-f]{64}"
        assert re.fullmatch(rf"[\w./-]+:v?\d[\w.]*{digest}", service["image"]), name
        assert "build" in service or re.fullmatch(r"[1-9]\d*:\d+", service["user"]), name
        assert service["security_opt"] == ["no-new-privileges:true"] and "test" in service["healthcheck"], name
    server = found["services"]["server"]
    assert (DOCKER / server["build"]["context"] / server["build"]["dockerfile"]).exists()
    ours, stock = split_argv([re.sub(r"^\$\{\w+:[-?](.*)\}$", r"\1", word) for word in server["command"]])
    assert int(server["stop_grace_period"].removesuffix("s")) > ours.adapt_drain_timeout + STOP_GRACE_S
    assert "--enable-metrics" in stock
    scraped = yaml.safe_load((DOCKER / "monitoring" / "prometheus.yml").read_text())["scrape_configs"][0]
    assert scraped["static_configs"] == [{"targets": ["server:30000"]}]


def run_compose(**variables: str) -> subprocess.CompletedProcess[str]:
    """What compose makes of the file; skips where there is no compose."""
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    said: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "check": False}
    said["env"] = {"PATH": path, "HOME": "/nonexistent", **variables}
    docker = shutil.which("docker")
    if docker and subprocess.run([docker, "compose", "version"], **said).returncode == 0:
        return subprocess.run([docker, "compose", "-f", str(DOCKER / "compose.yaml"), "config"], **said)
    old = shutil.which("docker-compose")
    if old is None:
        pytest.skip("neither docker compose nor docker-compose is installed (apt install docker-compose)")
    # The first generation does not know the name of a project.
    text = (DOCKER / "compose.yaml").read_text()
    assert text.count("\nname: ") == 1
    text = re.sub(r"^name: .*$", "", text, flags=re.M)
    return subprocess.run([old, "-f", "-", "config"], input=text, cwd=DOCKER, **said)


def test_compose_itself_takes_the_file() -> None:
    run = run_compose(MODEL="a/model", TP_SIZES="1,2,4")
    assert run.returncode == 0, run.stderr
    made = yaml.safe_load(run.stdout)
    assert set(made["services"]) == set(compose()["services"])
    server = made["services"]["server"]
    assert server["command"][:6] == ["--model-path", "a/model", "--host", "0.0.0.0", "--adapt-tp-sizes", "1,2,4"]
    assert server["build"]["context"] == str(ROOT)
    assert set(made["volumes"]) == {"cache", "prometheus", "grafana"}


def test_compose_asks_which_model() -> None:
    run = run_compose()
    assert run.returncode != 0
    assert "say which model" in run.stderr
