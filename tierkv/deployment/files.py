"""Writes the files of a deployment: a Helm chart, a compose file, or systemd units.

Called by ``tierkv deploy``. The templates are in templates/. Files with secrets are readable by
their owner only. Nothing outside the given folder is touched, and no server is called.

``plan_deployment`` completes the given settings with what several processes must agree on; pure but
for the random secrets. The settings file holds only what was given and what is added here; each
role's addresses come from its own environment, which overrides the file.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import version
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template
from typing import Any, Final

from tierkv.config import LoadedConfig, changed_toml
from tierkv.kvcore.errors import ConfigError
from tierkv.parts.access import token_or_new
from tierkv.processes.worker_group import require_several
from tierkv.settings import Settings

PLACED = ("cluster.run_dir", "cluster.host", "cluster.advertise", "cluster.meta_address")
"""Settings that each target gives to each process."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One cluster to be deployed.

    Attributes:
        settings: the completed settings.
        toml: the settings file of all processes, with secrets.
        counts: number of nodes by role.
        image: container image of all roles.
        version: of TierKV.
        made: secrets that were made up here, by setting, for people.
    """

    settings: Settings
    toml: str
    counts: Mapping[str, int]
    image: str
    version: str
    made: tuple[str, ...]


def plan_deployment(
    loaded: LoadedConfig,
    *,
    counts: Mapping[str, int],
    image: str = "",
    is_open: bool,
) -> Deployment:
    """Complete the settings.

    Args:
        loaded: the settings given by file, environment and flags.
        counts: number of nodes of ``meta``, ``compute`` and ``front``.
        image: container image; empty: ``tierkv:VERSION``.
        is_open: the front's ports are reached from outside its machine, so clients need passwords.

    Raises:
        ConfigError: the settings can't work for several processes.
    """
    settings, release = loaded.settings, version("tierkv")
    _check(settings, counts)
    more: dict[str, Any] = {}
    if not settings.cluster.token_file and not settings.cluster.token:
        more["cluster.token"] = token_or_new(settings.cluster)
    if not settings.cluster.secret and "://" not in settings.meta.database:
        more["cluster.secret"] = secrets.token_hex(16)
    if is_open and not settings.front.postgres and not settings.front.users:
        more["front.users"] = {"tierkv": secrets.token_urlsafe(18)}
    if is_open and not settings.front.api_keys:
        more["front.api_keys"] = {"sk-" + secrets.token_urlsafe(24): "default"}
    return Deployment(
        settings,
        changed_toml(loaded, more, leave_out=PLACED),
        counts,
        image or f"tierkv:{release}",
        release,
        tuple(more),
    )


def _check(settings: Settings, counts: Mapping[str, int]) -> None:
    require_several(settings.meta, counts["meta"])
    if counts["front"] > 1 and not settings.front.postgres:
        raise ConfigError(
            "several fronts share tables only in PostgreSQL",
            hint="Give front.postgres, or --front 1.",
        )
    if settings.compute.more_models:
        raise ConfigError(
            "a deployment has one model",
            hint="Deploy the nodes of another model as a second release, with the same "
            "cluster.meta_address.",
        )


def quoted(text: object) -> str:
    """Write a value such that YAML reads the same text, number or truth value."""
    return json.dumps(text)


ROLES: Final = ("meta", "dmp", "compute", "front")
META_PORT: Final = 7400
STATE: Final = "/var/lib/tierkv"
_PRIVATE: Final = 0o600


def write_helm(plan: Deployment, out: Path) -> list[Path]:
    """Write a chart; ``helm install NAME FOLDER`` deploys it.

    Raises:
        ConfigError: the folder can't be written, or holds something else.
    """
    settings = plan.settings
    repository, _, tag = plan.image.rpartition(":")
    values = {
        "version": tag or plan.version,
        "meta": plan.counts["meta"],
        "compute": plan.counts["compute"],
        "front": plan.counts["front"],
        "capacity": quoted(str(int(settings.dmp.capacity))),
        "segment_dir": settings.dmp.segment_dir,
        "disk_path": quoted(settings.dmp.disk_path),
        "pool_drain": max(5, round(settings.dmp.drain_s)),
        "front_drain": max(30, round(settings.front.drain_s)),
        "gpus": int(settings.compute.device.startswith("cuda")),
        "engine": settings.engine.kind,
    }
    folder = resources.files("tierkv.deployment") / "templates"
    chart = folder / "helm"
    texts = {
        Path("Chart.yaml"): Template(_text(chart / "Chart.yaml")).substitute(version=plan.version),
        Path("values.yaml"): Template(_text(chart / "values.yaml"))
        .substitute(values)
        .replace("repository: tierkv", f"repository: {quoted(repository or plan.image)}", 1),
        Path("files/tierkv.toml"): plan.toml,
        Path("Containerfile"): _text(folder / "Containerfile"),
        Path(".helmignore"): "Containerfile\n",
    }
    for template in (chart / "templates").iterdir():
        texts[Path("templates") / template.name] = _text(template)
    return _write(out, texts, secret=Path("files/tierkv.toml"))


def write_compose(plan: Deployment, out: Path) -> list[Path]:
    """Write a compose file for one machine; ``podman compose up`` runs it.

    Raises:
        ConfigError: as ``write_helm``.
    """
    settings, folder = plan.settings, resources.files("tierkv.deployment") / "templates"
    more = "".join(
        f"  compute-{number}:\n"
        "    <<: *role\n"
        f"    command: [serve, compute, --node-id, compute-{number}]\n"
        "    ipc: service:dmp\n"
        "    depends_on: [dmp]\n"
        "    stop_grace_period: 30s\n"
        "    environment:\n"
        "      <<: *environment\n"
        "      TIERKV_COMPUTE_BIND: 0.0.0.0\n"
        '      TIERKV_COMPUTE_PORT: "7600"\n'
        f"      TIERKV_CLUSTER_ADVERTISE: compute-{number}\n"
        for number in range(1, plan.counts["compute"])
    )
    text = Template(_text(folder / "compose" / "compose.yaml")).substitute(
        image=plan.image,
        meta_more="".join(
            f"      {name}: {value}\n" for name, value in _files_of(settings, "meta").items()
        ),
        front_more="".join(
            f"      {name}: {value}\n" for name, value in _files_of(settings, "front").items()
        ),
        shm_bytes=int(settings.dmp.capacity) + (64 << 20),
        pool_stop=round(settings.dmp.drain_s) + 30,
        front_stop=round(settings.front.drain_s) + 30,
        compute_more=more,
    )
    texts = {
        Path("compose.yaml"): text,
        Path("tierkv.toml"): plan.toml,
        Path("Containerfile"): _text(folder / "Containerfile"),
    }
    return _write(out, texts, secret=Path("tierkv.toml"))


def write_systemd(plan: Deployment, out: Path, roles: Sequence[str]) -> list[Path]:
    """Write a unit per role, a target, and the account; for this machine's ``tierkv``.

    Args:
        plan: the cluster.
        out: the folder.
        roles: which roles this machine runs.

    Raises:
        ConfigError: as ``write_helm``.
    """
    folder = resources.files("tierkv.deployment") / "templates" / "systemd"
    units = {role: f"tierkv-{role}.service" for role in roles}
    target = Template(_text(folder / "tierkv.target")).substitute(wants=" ".join(units.values()))
    texts = {
        Path("tierkv.target"): target,
        Path("sysusers.d/tierkv.conf"): _text(folder / "sysusers.conf"),
        Path("tierkv.toml"): plan.toml,
    }
    program = shutil.which("tierkv", path=str(Path(sys.executable).parent)) or "/usr/bin/tierkv"
    template = Template(_text(folder / "role.service"))
    for role, unit in units.items():
        texts[Path(unit)] = template.substitute(
            role=role,
            program=program,
            stop=_stop_s(plan.settings, role),
            more="\n".join(_environment(plan.settings, role)),
            writable=" ".join(_writable(plan.settings, role)),
        )
    return _write(out, texts, secret=Path("tierkv.toml"))


def _environment(settings: Settings, role: str) -> list[str]:
    """Return what a unit adds to the settings file, unless the settings say something else."""
    added = {"TIERKV_CLUSTER_RUN_DIR": STATE}
    address = settings.cluster.meta_address or f"{settings.meta.bind}:{META_PORT}"
    added["TIERKV_CLUSTER_META_ADDRESS"] = address
    if role == "meta":
        added["TIERKV_META_PORT"] = str(settings.meta.port or META_PORT)
    added |= _files_of(settings, role)
    if settings.cluster.advertise:
        added["TIERKV_CLUSTER_ADVERTISE"] = settings.cluster.advertise
    return [f"Environment={name}={value}" for name, value in added.items()]


def _files_of(settings: Settings, role: str) -> dict[str, str]:
    """Return where a role keeps its files, unless the settings say; these may hold passwords."""
    files = {
        "meta": {"TIERKV_META_DATABASE": (settings.meta.database, "meta.sqlite")},
        "front": {
            "TIERKV_FRONT_DATABASE": (settings.front.database, "tables.duckdb"),
            "TIERKV_FRONT_STATS_PATH": (settings.front.stats_path, "statistics.sqlite"),
        },
    }
    return {
        variable: f"{STATE}/{name}"
        for variable, (given, name) in files.get(role, {}).items()
        if not given
    }


def _writable(settings: Settings, role: str) -> list[str]:
    """Return the folders besides its own that a role writes to."""
    given = {
        "dmp": (settings.dmp.segment_dir, settings.dmp.disk_path),
        "compute": (settings.dmp.segment_dir,),
        "front": (settings.front.trace_dir,),
    }
    files = {"meta": (settings.meta.database,), "front": (settings.front.database,)}
    folders = [str(Path(file).parent) for file in files.get(role, ()) if file.startswith("/")]
    return sorted({*folders, *filter(None, given.get(role, ()))})


def _stop_s(settings: Settings, role: str) -> int:
    drain_s = {"front": settings.front.drain_s, "dmp": settings.dmp.drain_s}.get(role, 0.0)
    return round(drain_s) + 30


def _text(file: Traversable) -> str:
    return file.read_text(encoding="utf-8")


def _write(out: Path, texts: dict[Path, str], *, secret: Path) -> list[Path]:
    """Write files below a folder that is empty, missing, or of an earlier deployment.

    Only files of earlier deployments are replaced; a settings file is kept, because its secrets may
    be in use.
    """
    written = []
    try:
        marker = out / ".tierkv-deploy"
        if out.exists() and any(out.iterdir()) and not marker.exists():
            raise ConfigError(
                f"{out} is not empty, and nothing there was written by tierkv deploy",
                hint="Give another --out FOLDER.",
            )
        for path, text in {Path(marker.name): "", **texts}.items():
            file = out / path
            file.parent.mkdir(parents=True, exist_ok=True)
            if path == secret and file.exists():
                continue
            descriptor = os.open(
                file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _PRIVATE if path == secret else 0o644
            )
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            written.append(file)
    except OSError as error:
        raise ConfigError(f"can't write to {out}: {error.strerror}") from None
    return written
