"""``tierkv deploy``: files that run a cluster under Kubernetes, compose or systemd.

The settings are those of every other verb: a file, the environment, ``--set``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from tierkv.commands.options import Target
from tierkv.config import LoadedConfig
from tierkv.deployment.files import ROLES, write_compose, write_helm, write_systemd
from tierkv.deployment.plan import plan_deployment
from tierkv.kvcore.errors import UserError

_NEXT: Mapping[Target, str] = {
    Target.HELM: "helm install tierkv {out} --namespace tierkv --create-namespace",
    Target.COMPOSE: "podman build -t {image} -f {out}/Containerfile . && "
    "podman compose -f {out}/compose.yaml up",
    Target.SYSTEMD: "cd {out} && install -D -m 600 tierkv.toml /etc/tierkv/tierkv.toml && "
    "systemd-sysusers sysusers.d/tierkv.conf && chown tierkv /etc/tierkv/tierkv.toml && "
    "cp *.service *.target /etc/systemd/system/ && systemctl enable --now {units} tierkv.target",
}


def deploy(
    loaded: LoadedConfig,
    target: Target,
    out: Path,
    *,
    counts: Mapping[str, int],
    image: str,
    roles: Sequence[str],
) -> int:
    """Write the files and tell how to use them; return the exit status.

    Raises:
        ConfigError: settings that can't work, or a folder that can't be written.
        UserError: an unknown role.
    """
    if unknown := sorted(set(roles) - set(ROLES)):
        raise UserError(f"unknown role {unknown[0]!r}", hint=f"Roles are {', '.join(ROLES)}.")
    plan = plan_deployment(loaded, counts=counts, image=image, is_open=target is not Target.SYSTEMD)
    if target is Target.HELM:
        written = write_helm(plan, out)
    elif target is Target.COMPOSE:
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
    return 0
