"""``tierkv connect``: the line to start another engine on the pool, and the next commands.

Registered by tierkv/cli.py. A thin shell over integrations/launch.py, which writes the line, and
tierkv/commands/connect_checks.py, which inspects the environment. The line goes to standard output
for scripts, the findings to standard error for people.
"""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from tierkv.commands.doctor import OK, Finding
from tierkv.config import load_config
from tierkv.integrations.launch import (
    EngineRole,
    Events,
    Launch,
    LaunchKind,
    LaunchWish,
    plan_launch,
    serve_command,
)
from tierkv.processes.cluster_files import CONFIG_FILE, STATE_FILE, find_token
from tierkv.settings import Settings

DEFAULT_POOL: Final = "127.0.0.1:7401"
"""The address of the node in docs/pool.md."""


class LineFormat(StrEnum):
    """Format of the printed line."""

    TEXT = "text"
    JSON = "json"


EngineArgument = Annotated[LaunchKind, typer.Argument(help="The engine to start.")]
ModelOption = Annotated[str, typer.Option("--model", help="The model's folder, or its name.")]
PoolOption = Annotated[
    str | None, typer.Option(help="HOST:PORT of pool nodes, separated by commas.")
]
MetaOption = Annotated[
    str | None, typer.Option(help="HOST:PORT of a cluster's meta server; default: the setting.")
]
RoleOption = Annotated[EngineRole, typer.Option(help="Which part of requests the engine computes.")]
BlockOption = Annotated[
    int | None, typer.Option("--block-size", min=1, max=4096, help="Tokens per block.")
]
RanksOption = Annotated[
    int, typer.Option("--tensor-parallel", min=1, max=1024, help="Ranks that share each layer.")
]
HostOption = Annotated[str, typer.Option(help="Address on which the engine listens.")]
PortOption = Annotated[
    int,
    typer.Option(min=0, max=65535, help="The engine's port; 0: 8100 for vLLM, 30000 for SGLang."),
]
TenantOption = Annotated[str | None, typer.Option(help="Tenant of requests that name no tenant.")]
TokenOption = Annotated[
    Path | None, typer.Option(help="File with the cluster token, read by the engine.")
]
EventsOption = Annotated[
    Events | None,
    typer.Option(help="Who receives events of the engine's own cache; local with a meta server."),
]
FormatOption = Annotated[LineFormat, typer.Option("--format", help="How the line is printed.")]
SettingsOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set any setting.")
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="TOML file of settings.")]


def connect(
    engine: EngineArgument,
    model: ModelOption,
    pool: PoolOption = None,
    meta: MetaOption = None,
    role: RoleOption = EngineRole.BOTH,
    block_size: BlockOption = None,
    tensor_parallel: RanksOption = 1,
    host: HostOption = "127.0.0.1",
    port: PortOption = 0,
    tenant: TenantOption = None,
    token_file: TokenOption = None,
    events: EventsOption = None,
    output: FormatOption = LineFormat.TEXT,
    config: ConfigOption = None,
    settings: SettingsOption = None,
) -> None:
    """Print the line that starts vLLM or SGLang with its KV in the pool.

    Check the installation, the model and the pool, and start nothing. While `tierkv up` is running
    here, the line is for that cluster.

    Example: tierkv connect vllm --model ./Llama-3.1-8B --pool 127.0.0.1:7401
    """
    from tierkv.commands.connect_checks import (
        CPU_PACKAGE,
        Model,
        check_block,
        check_meta,
        check_pool,
        check_version,
    )
    from tierkv.integrations.settings import PoolAccess

    loaded, config, findings = _cluster(config, _pairs(settings), asked=bool(pool or meta))
    meta = meta or ("" if pool else loaded.cluster.meta_address)
    if loaded.cluster.token_file and token_file is None:
        token_file = Path(loaded.cluster.token_file)
    if loaded.cluster.token and token_file is None:
        token_file = find_token(loaded.cluster.run_dir.expanduser(), loaded.cluster.token)
    told = _pool_settings(loaded, pool=pool, meta=meta, tenant=tenant, token_file=token_file)
    seen = Model(model, engine=engine, ranks=tensor_parallel)
    installed = check_version(engine)
    tokens = block_size or seen.block_tokens()
    wish = LaunchWish(
        engine,
        model,
        told,
        role=role,
        block_tokens=tokens,
        ranks=tensor_parallel,
        host=host,
        port=port,
        events=events or (Events.LOCAL if meta else Events.OFF),
        events_folder=tempfile.gettempdir(),
        as_module=installed.subject == CPU_PACKAGE,
    )
    launch = plan_launch(wish)
    reach = PoolAccess.read(told, where=f"tierkv connect {engine}")
    findings += [installed, *seen.findings, check_block(seen, tokens, engine)]
    findings += [check_meta(reach)] if meta else []
    findings += [check_pool(reach)] if reach.pool else []
    _print(launch, findings, list(_next(wish, launch, meta, config)), output)


def _cluster(
    config: Path | None, given: dict[str, Any], *, asked: bool
) -> tuple[Settings, Path | None, list[Finding]]:
    """Load settings: from the cluster running from run_dir, unless an address is given."""
    loaded = load_config(config, flags=given).settings
    run_dir = loaded.cluster.run_dir.expanduser().absolute()
    if asked or loaded.cluster.meta_address or not (run_dir / STATE_FILE).exists():
        return loaded, config, []
    config = run_dir / CONFIG_FILE
    found = Finding("cluster", OK, f"the one that runs from {run_dir}")
    return load_config(config, flags=given).settings, config, [found]


def _pool_settings(
    loaded: Settings, *, pool: str | None, meta: str, tenant: str | None, token_file: Path | None
) -> dict[str, Any]:
    """Return the mapping for integrations/settings.py inside the engine."""
    told: dict[str, Any] = {}
    if pool or not meta:
        told["pool"] = pool or DEFAULT_POOL
    if meta:
        told["meta"] = meta
    if tenant:
        told["tenant"] = tenant
    if token_file is not None:
        told["token_file"] = str(token_file.expanduser().absolute())
    if loaded.pool.transport != "auto":
        told["transport"] = loaded.pool.transport
    own = bool(loaded.pool.tls_ca)
    for name in ("tls_ca", "tls_cert", "tls_key", "tls_name"):
        if value := getattr(loaded.pool if own else loaded.cluster, name):
            told[name] = str(value)
    if meta and loaded.cluster.tls_ca and not own:
        told["tls_meta"] = True
    return told


def _next(
    wish: LaunchWish, launch: Launch, meta: str, config: Path | None
) -> Iterator[tuple[str, str]]:
    """Yield purpose and text of the commands to run after the engine has started."""
    rest = ("--config", str(config.absolute())) if config else ()
    token = "" if config else _token_of(wish.pool.get("token_file"))
    if meta:
        argv = (*serve_command(wish, launch, meta=meta), *rest)
        yield "have SQL and REST calls of the cluster answered by it", token + shlex.join(argv)
        see = ("tierkv", "status", "--set", f"cluster.meta_address={meta}", *rest)
        yield "see it", token + shlex.join(see)
        return
    stats = ("tierkv", "pool", "stats", str(wish.pool["pool"]), *rest)
    yield "see what it keeps", token + shlex.join(stats)


def _token_of(file: str | None) -> str:
    """Return a shell prefix that passes a file's token, invisible to other users."""
    return f'TIERKV_CLUSTER_TOKEN="$(cat {shlex.quote(file)})" ' if file else ""


def _print(
    launch: Launch, findings: list[Finding], after: list[tuple[str, str]], output: LineFormat
) -> None:
    if output is LineFormat.JSON:
        value = {
            "argv": list(launch.argv),
            "line": launch.line(),
            "url": launch.url,
            "findings": [
                {"subject": f.subject, "state": f.state, "found": f.found, "cure": f.cure}
                for f in findings
            ],
            "next": [{"what_for": what_for, "command": command} for what_for, command in after],
        }
        typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
        return
    from tierkv.commands.doctor import COLOURS

    for finding in findings:
        typer.secho(f"{finding.state:<9}", fg=COLOURS[finding.state], nl=False, err=True)
        typer.echo(f"{finding.subject}: {finding.found}", err=True)
        if finding.cure:
            typer.echo(f"{'':<9}  -> {finding.cure}", err=True)
    typer.echo(launch.line())
    for what_for, command in after:
        typer.echo(f"then, to {what_for}:\n  {command}", err=True)


def _pairs(settings: list[str] | None) -> dict[str, Any]:
    given = [pair.partition("=") for pair in settings or ()]
    for key, equals, _ in given:
        if not equals:
            raise typer.BadParameter(f"--set expects KEY=VALUE, got {key!r}")
    return {key: value for key, _, value in given}
