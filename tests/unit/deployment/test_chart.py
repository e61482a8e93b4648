"""The Helm chart, by Helm's own library and the Kubernetes schemas: no server is asked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmRenderError

from tierkv.commands.deploy import write_files
from tierkv.commands.options import DeployTarget
from tierkv.config import load_config
from tierkv.deployment.files import ROLES

EVERYTHING: dict[str, Any] = {
    "compute": {
        "autoscaling": {"enabled": True},
        "gpus": 2,
        "modelVolume": {"persistentVolumeClaim": {"claimName": "models"}},
        "resources": {"limits": {"memory": "64Gi"}},
    },
    "pool": {"diskPath": "/mnt/kv", "segmentDir": "/mnt/shm"},
    "front": {"storage": "10Gi"},
    "tls": {"secretName": "certificates"},
    "image": {"pullSecrets": [{"name": "mine"}]},
    "networkPolicy": {"clients": [{"namespaceSelector": {}}]},
}
ENGINES = {
    kind: EVERYTHING
    | {"engine": {"kind": kind, "image": f"{kind}:1", "args": ["--model", "/models/m"]}}
    for kind in ("vllm", "sglang")
}


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    out = tmp_path / "chart"
    write(out)
    return out


def write(out: Path, *, front: int = 1, **flags: Any) -> None:
    loaded = load_config(flags=flags, environ={})
    counts = {"meta": 3, "compute": 2, "front": front}
    write_files(loaded, DeployTarget.HELM, out, counts=counts, image="", roles=ROLES)


def rendered(chart: Path, values: dict[str, Any]) -> list[dict[str, Any]]:
    texts = Chart.load(chart).render(values, name="kv", namespace="prod")
    found = (
        each
        for name, text in texts.items()
        if name.endswith(".yaml")
        for each in yaml.safe_load_all(text)
    )
    return [each for each in found if each]


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


def container(workload: dict[str, Any], name: str = "") -> dict[str, Any]:
    found = workload["spec"]["template"]["spec"]["containers"]
    return next(each for each in found if each["name"] == (name or found[0]["name"]))


def test_helm_has_nothing_to_say_against_it(chart: Path) -> None:
    report = lint(chart, EVERYTHING, strict=True)
    assert report["errors"] == []
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize("values", [{}, EVERYTHING, *ENGINES.values()])
def test_every_object_is_valid(chart: Path, tmp_path: Path, values: dict[str, Any]) -> None:
    objects = rendered(chart, values)
    file = tmp_path / "objects.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    program = Path(sys.executable).with_name("kubernetes-validate")
    checked = subprocess.run([program, "--strict", file], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    kinds = Counter(each["kind"] for each in objects)
    assert kinds["DaemonSet"] == kinds["StatefulSet"] == 1
    assert (kinds["Deployment"], kinds["PodDisruptionBudget"], kinds["NetworkPolicy"]) == (2, 2, 2)
    assert kinds["HorizontalPodAutoscaler"] == bool(values)


def test_prometheus_is_told_where_to_look(chart: Path) -> None:
    (monitor,) = of_kind(rendered(chart, {"podMonitor": {"enabled": True}}), "PodMonitor").values()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["path"], endpoint["port"]) == ("/metrics", "http")


def test_all_roles_know_the_meta_servers_and_share_a_machines_memory(chart: Path) -> None:
    objects = rendered(chart, {})
    workloads = [*of_kind(objects, "Deployment").values(), *of_kind(objects, "DaemonSet").values()]
    for workload in (*workloads, *of_kind(objects, "StatefulSet").values()):
        environment = {e["name"]: e for e in container(workload)["env"]}
        metas = environment["TIERKV_CLUSTER_META_ADDRESS"]["value"].split(",")
        assert metas == [f"kv-meta-{n}.kv-meta.prod.svc:7400" for n in range(3)]
        place = environment["TIERKV_CLUSTER_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert place == "spec.nodeName"
    segments = [
        volume["hostPath"]["path"]
        for workload in workloads
        for volume in workload["spec"]["template"]["spec"]["volumes"]
        if volume["name"] == "segment"
    ]
    assert segments == ["/dev/shm"] * 2


def test_zones_come_from_the_pods_labels_where_asked(chart: Path) -> None:
    def zone(values: dict[str, Any]) -> list[Any]:
        pools = of_kind(rendered(chart, values), "DaemonSet")
        (pool,) = pools.values()
        return [e for e in container(pool)["env"] if e["name"] == "TIERKV_CLUSTER_ZONE"]

    assert zone({}) == []
    (entry,) = zone({"zones": True})
    label = "metadata.labels['topology.kubernetes.io/zone']"
    assert entry["valueFrom"]["fieldRef"]["fieldPath"] == label


def test_certificates_are_mounted_where_the_settings_look(chart: Path) -> None:
    for kind in ("Deployment", "DaemonSet", "StatefulSet"):
        for workload in of_kind(rendered(chart, EVERYTHING), kind).values():
            mounts = {m["name"]: m["mountPath"] for m in container(workload)["volumeMounts"]}
            volumes = workload["spec"]["template"]["spec"]["volumes"]
            assert {"secretName": "certificates", "defaultMode": 0o440} in [
                volume.get("secret") for volume in volumes
            ]
            environment = {e["name"]: e.get("value") for e in container(workload)["env"]}
            settings = load_config(
                environ={k: v for k, v in environment.items() if v and k != "TIERKV_CONFIG"}
            ).settings
            assert settings.cluster.tls_cert == f"{mounts['tls']}/tls.crt"
            assert settings.cluster.tls_name == "tierkv.internal"


def test_gpus_belong_to_whoever_computes(chart: Path) -> None:
    own = of_kind(rendered(chart, EVERYTHING), "Deployment")["kv-compute"]
    assert container(own)["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 2}
    beside = of_kind(rendered(chart, ENGINES["vllm"]), "Deployment")["kv-compute"]
    assert "nvidia.com/gpu" not in container(beside, "compute")["resources"]["limits"]
    assert container(beside, "vllm")["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert container(beside, "compute")["args"][-4:] == [
        "--engine", "vllm", "--url", "http://127.0.0.1:8100",
    ]  # fmt: skip


def test_what_contradicts_itself_is_refused(chart: Path) -> None:
    with pytest.raises(HelmRenderError, match=r"set front\.replicas to 1"):
        rendered(chart, {"front": {"storage": "10Gi", "replicas": 2}})
    with pytest.raises(HelmRenderError, match=r"engine\.image"):
        rendered(chart, {"engine": {"kind": "vllm"}})


def test_settings_reach_the_pods_and_secrets_are_made_once(chart: Path) -> None:
    (secret,) = of_kind(rendered(chart, {}), "Secret").values()
    text = secret["stringData"]["tierkv.toml"]
    assert 'token = "' in text and "users = {" in text and "api_keys = {" in text
    file = chart / "files/tierkv.toml"
    assert file.stat().st_mode & 0o077 == 0
    write(chart, **{"dmp.capacity": "3GiB"})
    assert file.read_text() == text.strip() + "\n" or file.read_text().strip() == text.strip()
    pool = container(of_kind(rendered(chart, {}), "DaemonSet")["kv-pool"])
    assert {"name": "TIERKV_DMP_CAPACITY", "value": str(3 << 30)} in pool["env"]
    json.dumps(pool)
