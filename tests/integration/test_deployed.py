"""The processes of a chart and of units, started here as the kubelet and systemd would.

Each pod has a loopback address of its own. Its command, environment and settings are those of the
rendered chart; names of services become addresses, and folders of hosts become folders of the test.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml
from helm_python.chart import Chart

from tests.fix_cluster import ROOT, free_port, wait_for
from tierkv.commands.deploy import write_files
from tierkv.commands.options import DeployTarget
from tierkv.config import load_config
from tierkv.deployment.files import ROLES

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
ASK = "SELECT ai_generate('Mia bought a kettle. Question: What did she buy?')"
SMALL = {"dmp.capacity": "64MiB", "dmp.remove_on_stop": True, "compute.threads": 1}


@contextmanager
def running(processes: Mapping[str, tuple[Sequence[str], Mapping[str, str]]]) -> Iterator[None]:
    """Run commands with exactly these environments until the block ends; each must get ready."""
    started: list[subprocess.Popen[bytes]] = []
    base = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    try:
        for arguments, environment in processes.values():
            command = [sys.executable, "-m", "tierkv", *arguments]
            started.append(
                subprocess.Popen(
                    command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                    env=base | dict(environment),
                )
            )  # fmt: skip
        for process in started:
            assert process.stdout is not None and process.stderr is not None
            assert b'"ready"' in process.stdout.readline(), process.stderr.read().decode()
        yield
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            process.communicate(timeout=60)


def deployed(target: DeployTarget, out: Path, counts: Mapping[str, int], **flags: Any) -> None:
    loaded = load_config(flags=SMALL | flags, environ={})
    write_files(loaded, target, out, counts=counts, image="", roles=ROLES)


def ask(host: str, port: int, user: str, password: str) -> str:
    dsn = f"host={host} port={port} user={user} password={password} dbname=main"
    with psycopg.connect(dsn, autocommit=True) as client:
        answered = client.execute(ASK).fetchone()
        assert answered is not None
        return str(answered[0])


class Pod:
    """A pod of a rendered workload."""

    def __init__(self, workload: Mapping[str, Any], name: str, address: str) -> None:
        self.container = workload["spec"]["template"]["spec"]["containers"][0]
        self.name, self.address = name, address

    def process(
        self, names: Mapping[str, str], folder: Path
    ) -> tuple[Sequence[str], Mapping[str, str]]:
        """Return command and environment, as the kubelet would make them."""
        fields = {
            "metadata.name": self.name, "status.podIP": self.address, "spec.nodeName": "machine",
        }  # fmt: skip
        environment: dict[str, str] = {}
        for each in self.container["env"]:
            value = (
                fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
                if "valueFrom" in each
                else _expanded(each["value"], environment)
            )
            for name, address in names.items():
                value = value.replace(name, address)
            value = value.replace("/etc/tierkv", str(folder))
            value = value.replace("/var/lib/tierkv", str(folder / self.name))
            environment[each["name"]] = self.address if value == "0.0.0.0" else value
        return [_expanded(word, environment) for word in self.container["args"]], environment


def _answers(url: str) -> bool:
    """Probe as the kubelet does: again until it succeeds. A front opens before it sees nodes."""
    try:
        with urllib.request.urlopen(url, timeout=20) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


def _expanded(text: str, environment: Mapping[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], text)


def test_the_pods_of_a_chart_are_a_cluster(tmp_path: Path) -> None:
    deployed(DeployTarget.HELM, tmp_path / "chart", {"meta": 3, "compute": 2, "front": 1})
    texts = Chart.load(tmp_path / "chart").render({}, name="kv", namespace="prod")
    objects = [
        each
        for name, text in texts.items()
        if name.endswith(".yaml")
        for each in yaml.safe_load_all(text)
        if each
    ]
    workloads = (each for each in objects if "template" in each.get("spec", {}))
    found = {each["metadata"]["name"]: each for each in workloads}
    names = ["kv-meta-0", "kv-meta-1", "kv-meta-2", "kv-pool", "kv-compute-0", "kv-compute-1",
             "kv-front"]  # fmt: skip
    pods = [
        Pod(found[re.sub(r"-\d$", "", name)], name, f"127.0.1.{number}")
        for number, name in enumerate(names, 1)
    ]
    (secret,) = (each for each in objects if each["kind"] == "Secret")
    settings = tmp_path / "tierkv.toml"
    settings.write_text(secret["stringData"]["tierkv.toml"])
    services = {f"{pod.name}.kv-meta.prod.svc": pod.address for pod in pods}
    ((user, password),) = tomllib.loads(settings.read_text())["front"]["users"].items()
    front = pods[-1]
    with running({pod.name: pod.process(services, tmp_path) for pod in pods}):
        probe = front.container["readinessProbe"]["httpGet"]["path"]
        wait_for(lambda: _answers(f"http://{front.address}:8000{probe}"), what="a probe's success")
        wait_for(lambda: ask(front.address, 5433, user, password) == "kettle", what="an answer")
        environment = front.process(services, tmp_path)[1]
        shown = subprocess.run(
            [sys.executable, "-m", "tierkv", "status", "--format", "json"],
            env={"PATH": os.environ["PATH"]} | dict(environment),
            cwd=ROOT, capture_output=True, text=True,
        )  # fmt: skip
        nodes = {row["node"]: row for row in json.loads(shown.stdout)}
        assert set(nodes) == {"dmp-machine", *(name for name in names if name != "kv-pool")}
        assert {row["host"] for row in nodes.values()} == {"machine"}
        assert "shm" in nodes["kv-compute-0"]["paths"]


def test_the_units_are_a_cluster(tmp_path: Path) -> None:
    ports = {name: free_port() for name in ("meta.port", "front.pg_port", "front.http_port")}
    deployed(
        DeployTarget.SYSTEMD, tmp_path, {"meta": 1, "compute": 1, "front": 1},
        **ports, **{"cluster.meta_address": f"127.0.0.1:{ports['meta.port']}"},
    )  # fmt: skip
    processes = {}
    for role in ROLES:
        unit = (tmp_path / f"tierkv-{role}.service").read_text()
        environment = dict(re.findall(r"^Environment=(\w+)=(.*)$", unit, re.MULTILINE))
        places = {"/etc/tierkv": str(tmp_path), "/var/lib/tierkv": str(tmp_path / "state")}
        for name, value in environment.items():
            for old, new in places.items():
                value = value.replace(old, new)
            environment[name] = value
        (program,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
        processes[role] = (program.split()[1:], environment)
    (tmp_path / "state").mkdir()
    with running(processes):
        port = ports["front.pg_port"]
        wait_for(lambda: ask("127.0.0.1", port, "tierkv", "") == "kettle", what="an answer")
