"""What `docker/` deploys with: Dockerfiles linted, the chart rendered by helm and held against schemas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.rows import ROOT

CHART = ROOT / "docker" / "kubernetes" / "quire"
GOLDEN = ROOT / "tests" / "fixtures" / "kubernetes"
VERSIONS = ("1.34", "1.37")
CLAIM = {"models": {"volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}}}
CASES: dict[str, dict[str, Any]] = {
    "cpu": CLAIM,
    "gpu": {
        **CLAIM,
        "gpu": {"resource": "nvidia.com/mig-3g.40gb", "count": 1},
        "runtimeClassName": "nvidia",
        "nodeSelector": {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "autoscaling": {"hpa": True},
        "serviceMonitor": {"enabled": True},
    },
    "keda": {**CLAIM, "autoscaling": {"keda": True, "maxReplicas": 8}},
}
"""Values by name of a golden file, which `QUIRE_WRITE_GOLDEN=1 pytest` writes anew."""


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def render(values: dict[str, Any], folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / "values.yaml"
    file.write_text(json.dumps(values), "utf-8")
    return tool("helm", "template", "chat", CHART, "--namespace", "models", "--values", file)


@pytest.mark.row("G15", clauses=("lint",))
@pytest.mark.parametrize("file", ["Dockerfile", "Dockerfile.cpu"])
def test_dockerfiles_pass_hadolint(file: str) -> None:
    """Debian's packages are not held at versions: the base decides them."""
    done = tool("hadolint", "--ignore", "DL3008", ROOT / "docker" / file)
    assert done.returncode == 0, done.stdout


@pytest.mark.row("G29")
@pytest.mark.parametrize("name", CASES)
def test_the_chart_renders_what_it_did(name: str, tmp_path: Path) -> None:
    done = render(CASES[name], tmp_path)
    assert done.returncode == 0, done.stderr
    if os.environ.get("QUIRE_WRITE_GOLDEN"):
        (GOLDEN / f"{name}.yaml").write_text(done.stdout, "utf-8")
    assert done.stdout == (GOLDEN / f"{name}.yaml").read_text("utf-8")


@pytest.mark.row("G12")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_the_manifests_fit_the_schemas_of_kubernetes(name: str, version: str) -> None:
    """Unknown fields included. Kinds of other projects have no schemas here; that they render is all."""
    kinds = []
    for one in yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text("utf-8")):
        kinds.append(one["kind"])
        if one["kind"] not in ("ServiceMonitor", "ScaledObject"):
            kubernetes_validate.validate(one, version, strict=True)
    assert {"Deployment", "Service", "PodDisruptionBudget"} <= set(kinds)
    assert ("HorizontalPodAutoscaler" in kinds) == (name == "gpu")
    assert ("ScaledObject" in kinds) == (name == "keda")


@pytest.mark.row("G29", clauses=("probe",))
def test_probes_see_what_a_wedged_server_hides() -> None:
    """Until it is ready nothing ends it; then it is ended for its tokens, not for its ports."""
    pods = yaml.safe_load_all((GOLDEN / "cpu.yaml").read_text("utf-8"))
    (spec,) = (one["spec"]["template"]["spec"] for one in pods if one["kind"] == "Deployment")
    (server,) = spec["containers"]
    startup, liveness = server["startupProbe"], server["livenessProbe"]
    assert startup["httpGet"] == {"path": "/v2/health/ready", "port": "http"}
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 600
    assert liveness["exec"]["command"][:2] == ["quire", "healthcheck"]
    assert int(liveness["exec"]["command"][-1]) < liveness["timeoutSeconds"]
    before = int(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert spec["terminationGracePeriodSeconds"] > before + 30


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "models.volume: the model repository's volume is needed"),
        ({**CLAIM, "autoscaling": {"hpa": True, "keda": True}}, "choose one"),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], words: str, tmp_path: Path) -> None:
    done = render(values, tmp_path)
    assert done.returncode == 1 and words in done.stderr


def test_helm_has_nothing_to_say_of_the_chart(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(CLAIM), "utf-8")
    done = tool("helm", "lint", "--strict", CHART, "--values", file)
    assert done.returncode == 0, done.stdout + done.stderr
