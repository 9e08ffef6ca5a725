"""What `docker/` deploys with: Dockerfiles linted, the chart rendered by helm and held against schemas."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.rows import ROOT

CHART = ROOT / "docker" / "kubernetes" / "quire"
SAMPLES = ROOT / "docker" / "kubernetes" / "samples"
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
    },
    "keda": {
        **CLAIM,
        "openai": {"enabled": True},
        "monitoring": {"enabled": True},
        "autoscaling": {
            "keda": True,
            "predictive": True,
            "minReplicas": 0,
            "maxReplicas": 8,
            "wakeOn": 'sum(rate(requests{service="chat"}[1m]))',
        },
    },
}
"""Values by name of a golden file, which `QUIRE_WRITE_GOLDEN=1 pytest` writes anew."""


def tool(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


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


def test_the_official_base_is_one_that_a_header_does_not_end() -> None:
    """26.06 to 26.08 were named safe, and end by one `Inference-Header-Content-Length`."""
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text("utf-8")
    image = re.search(r"^ARG TRITON_IMAGE=(\S+:(\d\d\.\d\d)-py3)$", dockerfile, re.MULTILINE)
    assert image is not None and image[2] >= "26.09"
    assert f"TRITON_IMAGE={image[1]}" in (ROOT / "docs" / "deployment.md").read_text("utf-8")
    for name in ("README.md", "SECURITY.md", "docker/README.md", "docker/Dockerfile"):
        least = re.findall(
            r"\b(\d\d\.\d\d)\s+or newer|older bases than (\d\d\.\d\d)", (ROOT / name).read_text("utf-8"), re.I
        )
        assert least and {"".join(one) for one in least} == {"26.09"}, name


def test_shell_scripts_pass_shellcheck() -> None:
    """All that git knows; the commands in the Dockerfiles are hadolint's."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in files.splitlines() if (ROOT / name).is_file()]
    scripts = [
        path for path in paths if path.read_bytes()[:30].startswith((b"#!/bin/sh", b"#!/usr/bin/env bash"))
    ]
    assert ROOT / ".ci" / "run" in scripts
    done = tool("shellcheck", *scripts)
    assert done.returncode == 0, done.stdout


@pytest.mark.row("G29", clauses=("helm",))
@pytest.mark.parametrize("name", CASES)
def test_the_chart_renders_what_it_did(name: str, tmp_path: Path) -> None:
    done = render(CASES[name], tmp_path)
    assert done.returncode == 0, done.stderr
    if os.environ.get("QUIRE_WRITE_GOLDEN"):
        (GOLDEN / f"{name}.yaml").write_text(done.stdout, "utf-8")
    assert done.stdout == (GOLDEN / f"{name}.yaml").read_text("utf-8")


def strict(model: Any) -> dict[str, Any]:
    """JSON schema of a kind, unknown fields refused."""
    # Go takes flags anywhere in an expression, Python at its beginning.
    text = json.dumps(model.model_json_schema()).replace("^(?i)", "(?i)^")
    schema: dict[str, Any] = json.loads(text)
    for one in (schema, *schema["$defs"].values()):
        if one.get("properties"):
            one["additionalProperties"] = False
    return schema


@cache
def operators() -> dict[str, Any]:
    """Schemas by kind, of kinds that operators bring. Their packages take seconds to import."""
    from cloudcoil.models.keda import v1alpha1 as keda
    from cloudcoil.models.prometheus_operator import v1 as prometheus_operator

    kinds = (keda.ScaledObject, prometheus_operator.ServiceMonitor, prometheus_operator.PrometheusRule)
    return {kind.__name__: strict(kind) for kind in kinds}


def validate(manifest: dict[str, Any], version: str) -> None:
    if (schema := operators().get(manifest["kind"])) is not None:
        jsonschema.validate(manifest, schema)
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.row("G12", clauses=("manifests",))
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_the_manifests_fit_their_schemas(name: str, version: str) -> None:
    """Those of two versions of Kubernetes, of KEDA and of Prometheus' operator."""
    kinds = []
    for one in yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text("utf-8")):
        kinds.append(one["kind"])
        validate(one, version)
    expected = {
        "cpu": [],
        "gpu": ["HorizontalPodAutoscaler"],
        "keda": ["ConfigMap", "PrometheusRule", "ScaledObject", "ServiceMonitor"],
    }
    assert sorted(kinds) == sorted(["Deployment", "PodDisruptionBudget", "Service", *expected[name]])


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("ScaledObject", ("spec", "triggers", 0)),
        ("ServiceMonitor", ("spec", "endpoints", 0)),
        ("PrometheusRule", ("spec", "groups", 0, "rules", 0)),
        ("Deployment", ("spec", "template", "spec", "containers", 0)),
    ],
)
def test_an_unknown_field_is_found(kind: str, path: tuple[str | int, ...]) -> None:
    """The control of the test above."""
    documents = yaml.safe_load_all((GOLDEN / "keda.yaml").read_text("utf-8"))
    (manifest,) = (one for one in documents if one["kind"] == kind)
    place: Any = manifest
    for step in path:
        place = place[step]
    place["unheardOf"] = "1"
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        validate(manifest, VERSIONS[0])


@pytest.mark.row("G13", clauses=("zero",))
def test_what_scales_to_zero_is_woken_by_what_comes() -> None:
    """A queue exists only where something runs, so what wakes it is a query of the requests that come."""
    documents = list(yaml.safe_load_all((GOLDEN / "keda.yaml").read_text("utf-8")))
    (scaled,) = (one["spec"] for one in documents if one["kind"] == "ScaledObject")
    assert scaled["minReplicaCount"] == 0
    assert scaled["triggers"][-1]["metadata"]["query"] == CASES["keda"]["autoscaling"]["wakeOn"]


@pytest.mark.slow
@pytest.mark.row("G4", clauses=("cost",))
@pytest.mark.row("G12", clauses=("rules", "predictive"))
@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian's package prometheus)")
def test_rules_and_queries_of_the_autoscaler_give_what_they_should(tmp_path: Path) -> None:
    """By Prometheus itself; the queue of the fixture is 33 after 15 minutes and grows by two a minute."""
    shutil.copy(CHART / "files" / "rules.yaml", tmp_path)
    suite = yaml.safe_load((GOLDEN / "rules_test.yaml").read_text("utf-8"))
    documents = yaml.safe_load_all((GOLDEN / "keda.yaml").read_text("utf-8"))
    (scaled,) = (one["spec"] for one in documents if one["kind"] == "ScaledObject")
    waiting, kv_use, _ = (trigger["metadata"]["query"] for trigger in scaled["triggers"])
    for query, labels, value in (
        (waiting, "{}", 43),
        (kv_use, 'quire:kv_use:max{namespace="models", service="chat"}', 0.75),
    ):
        samples = [{"labels": labels, "value": value}]
        suite["tests"][0]["promql_expr_test"].append(
            {"expr": query, "eval_time": "15m", "exp_samples": samples}
        )
    groups = yaml.safe_load((tmp_path / "rules.yaml").read_text("utf-8"))["groups"]
    alerts = [rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule]
    firing = 'count by (alertname) (ALERTS{alertstate="firing", service="%s"})'
    suite["tests"][2]["promql_expr_test"] = [
        {
            "expr": firing % "bad",
            "eval_time": "24m",
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in alerts],
        },
        {"expr": firing % "good", "eval_time": "24m", "exp_samples": []},
    ]
    (tmp_path / "test.yaml").write_text(yaml.safe_dump(suite), "utf-8")
    for words in (("check", "rules", "rules.yaml"), ("test", "rules", "test.yaml")):
        done = subprocess.run(["promtool", *words], cwd=tmp_path, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr


# --- samples ---


@pytest.mark.row("G29", clauses=("helm",))
@pytest.mark.parametrize("values", sorted(SAMPLES.glob("values/*.yaml")), ids=lambda file: file.stem)
def test_values_for_other_tools_render_and_fit(values: Path) -> None:
    done = tool("helm", "template", "chat", CHART, "--namespace", "models", "--values", values)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    for one in documents:
        validate(one, VERSIONS[-1])
    (pod,) = (one["spec"]["template"]["spec"] for one in documents if one["kind"] == "Deployment")
    given = yaml.safe_load(values.read_text("utf-8"))
    volumes = {one.pop("name"): one for one in pod["volumes"]}
    assert volumes["models"] == given["models"]["volume"]
    for name in (
        "nodeSelector",
        "affinity",
        "schedulerName",
        "topologySpreadConstraints",
        "runtimeClassName",
    ):
        assert pod.get(name) == given.get(name)
    if gpu := given.get("gpu"):
        limits = pod["containers"][0]["resources"]["limits"]
        assert limits[gpu.get("resource", "nvidia.com/gpu")] == gpu["count"]


def sample(name: str) -> dict[str, Any]:
    """Manifests of a sample by kind."""
    documents = yaml.safe_load_all((SAMPLES / f"{name}.yaml").read_text("utf-8"))
    return {one["kind"]: one for one in documents}


def image_command() -> list[str]:
    """CMD of the image for GPUs."""
    text = (ROOT / "docker" / "Dockerfile").read_text("utf-8").replace("\\\n", "")
    (line,) = (line for line in text.splitlines() if line.startswith("CMD ["))
    words: list[str] = json.loads(line.removeprefix("CMD "))
    return words


@pytest.mark.row("G14", clauses=("yaml", "paths"))
def test_kserve_runs_the_images_command_at_its_own_places() -> None:
    found = sample("kserve")
    runtime, service = found["ServingRuntime"]["spec"], found["InferenceService"]["spec"]
    (container,) = runtime["containers"]
    words = [word.replace("/mnt/models", "/models") for word in container["command"] + container["args"]]
    assert words == [*image_command(), "--http-port", "8080", "--grpc-port", "9000"]
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["httpGet"] == {"path": "/v2/health/ready", "port": 8080}
    assert container["livenessProbe"]["exec"]["command"][:4] == [
        "quire",
        "healthcheck",
        "--url",
        "127.0.0.1:9000",
    ]
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in runtime["volumes"]}
    model = service["predictor"]["model"]
    assert model["runtime"] == found["ServingRuntime"]["metadata"]["name"]
    assert model["modelFormat"]["name"] == runtime["supportedModelFormats"][0]["name"]
    assert model["protocolVersion"] in runtime["protocolVersions"]
    # What Kubernetes itself knows of both: the pod.
    pod = {"containers": runtime["containers"], "volumes": runtime["volumes"]}
    validate({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "chat"}, "spec": pod}, VERSIONS[-1])


@pytest.mark.row("G14", clauses=("notes",))
def test_the_page_has_notes_on_llm_inference_services() -> None:
    assert "LLMInferenceService" in (SAMPLES.parent / "README.md").read_text("utf-8")


@pytest.mark.row("G29", clauses=("helm",))
def test_samples_fit_the_chart() -> None:
    """Karmada, the inference pool and Volcano name objects of the chart; a group's pods are valid."""
    documents = list(yaml.safe_load_all((GOLDEN / "keda.yaml").read_text("utf-8")))
    there = {(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in documents}
    selected = sample("karmada")["PropagationPolicy"]["spec"]["resourceSelectors"]
    assert {(one["apiVersion"], one["kind"], one["name"]) for one in selected} <= there
    pool = sample("inferencepool")
    (deployment,) = (one["spec"] for one in documents if one["kind"] == "Deployment")
    labels = deployment["template"]["metadata"]["labels"]
    assert pool["InferencePool"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {
        port["containerPort"] for one in deployment["template"]["spec"]["containers"] for port in one["ports"]
    }
    assert {port["number"] for port in pool["InferencePool"]["spec"]["targetPorts"]} <= ports
    picker = yaml.safe_load(pool["ConfigMap"]["data"]["picker.yaml"])
    names = [plugin["type"] for plugin in picker["plugins"]]
    assert {one["pluginRef"] for one in picker["schedulingProfiles"][0]["plugins"]} <= set(names)
    metrics = (ROOT / "backend" / "quire" / "triton" / "metrics_board.py").read_text("utf-8")
    for engine in picker["plugins"][names.index("core-metrics-extractor")]["parameters"]["engineConfigs"]:
        assert all(f'"{name}"' in metrics for key, name in engine.items() if key.endswith("Spec"))
    volcano = yaml.safe_load((SAMPLES / "values" / "volcano.yaml").read_text("utf-8"))
    group = sample("volcano")["PodGroup"]
    assert volcano["podAnnotations"] == {"scheduling.k8s.io/group-name": group["metadata"]["name"]}
    assert group["spec"]["minMember"] == volcano["replicas"]
    (workers,) = (one["spec"]["leaderWorkerTemplate"] for one in [sample("lws")["LeaderWorkerSet"]])
    for name in ("leaderTemplate", "workerTemplate"):
        validate({"apiVersion": "v1", "kind": "Pod", **workers[name]}, VERSIONS[-1])
    (gateway,) = (one for one in workers["leaderTemplate"]["spec"]["containers"] if one["name"] == "openai")
    assert len(gateway["env"][-1]["value"].split(",")) == workers["size"]


# --- compose ---


def compose(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "docker" / name).read_text("utf-8"))
    return document


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_files_fit_the_specification(name: str) -> None:
    from compose_pydantic import ComposeSpecification

    schema = strict(ComposeSpecification)
    jsonschema.validate(compose(name), schema)
    wrong = compose(name)
    wrong["services"]["server"]["unheardOf"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(wrong, schema)


def test_compose_confines_what_it_starts_and_mounts_what_there_is() -> None:
    for name, service in compose("compose.yaml")["services"].items():
        assert service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                assert (ROOT / "docker" / volume.partition(":")[0]).is_file()


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
        ({**CLAIM, "autoscaling": {"keda": True}}, "it reads the rules that monitoring.enabled brings"),
        ({**CLAIM, "autoscaling": {"minReplicas": 0}}, "0 needs keda and wakeOn"),
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
