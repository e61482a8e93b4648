"""``tierkv deploy``: files that run a cluster under Kubernetes, compose or systemd.

The settings are those of every other verb: a file, the environment, ``--set``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from tierkv.commands.options import ConfigOption, DeployTarget, SetOption, load
from tierkv.config import LoadedConfig
from tierkv.kvcore.errors import UserError

_NEXT: Mapping[DeployTarget, str] = {
    DeployTarget.HELM: "helm install tierkv {out} --namespace tierkv --create-namespace",
    DeployTarget.COMPOSE: "podman build -t {image} -f {out}/Containerfile . && "
    "podman compose -f {out}/compose.yaml up",
    DeployTarget.SYSTEMD: "cd {out} && install -D -m 600 tierkv.toml /etc/tierkv/tierkv.toml && "
    "systemd-sysusers sysusers.d/tierkv.conf && chown tierkv /etc/tierkv/tierkv.toml && "
    "cp *.service *.target /etc/systemd/system/ && systemctl enable --now {units} tierkv.target",
}


def deploy(
    target: Annotated[DeployTarget, typer.Argument(help="What runs the processes.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the files.")],
    meta: Annotated[int | None, typer.Option(min=1, help="Meta servers (helm: 3).")] = None,
    compute: Annotated[int, typer.Option(min=0, help="Compute nodes.")] = 1,
    front: Annotated[int, typer.Option(min=1, help="Fronts; several need front.postgres.")] = 1,
    image: Annotated[str, typer.Option(help="Container image; default: tierkv:VERSION.")] = "",
    roles: Annotated[
        str, typer.Option(help="Roles on this machine, for systemd; default: all.")
    ] = "",
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Write the files that run a cluster under Kubernetes, compose or systemd.

    The settings are those of every other verb; missing secrets are made and kept in the files.

    Example: tierkv deploy helm --out chart --compute 4 --set dmp.capacity=64GiB
    """
    counts = {"meta": meta or (3 if target is DeployTarget.HELM else 1)}
    counts |= {"compute": compute, "front": front}
    names = [name.strip() for name in roles.split(",") if name.strip()]
    write_files(load(config, settings), target, out, counts=counts, image=image, roles=names)


def write_files(
    loaded: LoadedConfig,
    target: DeployTarget,
    out: Path,
    *,
    counts: Mapping[str, int],
    image: str,
    roles: Sequence[str],
) -> None:
    """Write the files and tell how to use them; no ``roles`` means all of them.

    Raises:
        ConfigError: settings that can't work, or a folder that can't be written.
        UserError: an unknown role.
    """
    from tierkv.deployment.files import (
        ROLES,
        plan_deployment,
        write_compose,
        write_helm,
        write_systemd,
    )

    roles = roles or ROLES
    if unknown := sorted(set(roles) - set(ROLES)):
        raise UserError(f"unknown role {unknown[0]!r}", hint=f"Roles are {', '.join(ROLES)}.")
    plan = plan_deployment(
        loaded, counts=counts, image=image, is_open=target is not DeployTarget.SYSTEMD
    )
    if target is DeployTarget.HELM:
        written = write_helm(plan, out)
    elif target is DeployTarget.COMPOSE:
        written = write_compose(plan, out)
    else:
        written = write_systemd(plan, out, roles)
    settings_file = next(out.rglob("tierkv.toml"))
    typer.echo(f"wrote {len(written)} files to {out}")
    if settings_file not in written:
        typer.echo(f"{settings_file} was kept, with its secrets; delete it to have a new one")
    elif plan.made:
        typer.echo(f"{settings_file} has new secrets: {', '.join(plan.made)}")
    units = " ".join(f"tierkv-{role}" for role in roles)
    typer.echo("Next: " + _NEXT[target].format(out=out, image=plan.image, units=units))
