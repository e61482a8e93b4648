"""The ``tierkv`` command: parses arguments, loads the configuration, calls one verb.

Each verb imports its modules when it runs: torch, gRPC and DuckDB take seconds to import, which
``tierkv --help`` should not spend. A TierKVError is printed as one line and a hint, never as a
traceback.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from tierkv.commands.connect import connect
from tierkv.commands.deploy import deploy
from tierkv.commands.on_ray import down, scale, start
from tierkv.commands.options import (
    AddressOption,
    AnsweringEngine,
    ConfigOption,
    ModelOption,
    ModelsOption,
    PostgresOption,
    RayOption,
    Role,
    SetOption,
    WorkersOption,
    engine_flags,
    load,
    model_flags,
    role_flags,
)
from tierkv.commands.simulate import simulate
from tierkv.commands.tenants import key_app, namespace_app
from tierkv.config import list_entries
from tierkv.kvcore.errors import TierKVError
from tierkv.output import OutputFormat
from tierkv.processes.own_process import collecting_nothing, leave

app = typer.Typer(
    help="LLM inference inside the database, on a KV cache that all machines share.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Show the configuration.", no_args_is_help=True)
app.add_typer(config_app, name="config")
pool_app = typer.Typer(help="Use a memory pool by hand.", no_args_is_help=True)
app.add_typer(pool_app, name="pool")
app.add_typer(namespace_app, name="namespace")
app.add_typer(key_app, name="key")

app.command()(simulate)
app.command()(connect)
app.command()(deploy)
app.command()(scale)
app.command()(down)


def main() -> None:
    """Run the command line and end the process; the console script's entry point."""
    try:
        app(standalone_mode=True)
    except TierKVError as error:
        typer.secho(f"tierkv: {error.message}", fg="red", err=True)
        if error.hint and error.hint not in error.message:
            typer.echo(f"  {error.hint}", err=True)
        leave(1)
    except SystemExit as end:
        leave(end.code)


@app.command()
def sql(
    command: Annotated[
        list[str] | None, typer.Option("-c", "--command", help="SQL to run; may be repeated.")
    ] = None,
    file: Annotated[Path | None, typer.Option("-f", "--file", help="SQL file to run.")] = None,
    output: Annotated[
        OutputFormat, typer.Option("--format", help="How rows are printed.")
    ] = OutputFormat.TABLE,
    database: Annotated[
        str | None, typer.Option("--database", "-d", help="DuckDB file; default: in memory.")
    ] = None,
    models: ModelsOption = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print no progress and no summary.")
    ] = False,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Run SQL with AI calls in this process; nothing needs to be started.

    Without -c and -f, read statements from a pipe or show a prompt.

    Example: tierkv sql -c "SELECT ai_generate('Mia bought a kettle. Question: What did she buy?')"
    """
    with collecting_nothing():
        from tierkv.shell import sql_shell

    loaded = load(config, settings, front__database=database, **model_flags(models))
    if command and file is not None:
        raise typer.BadParameter("give -c or -f, not both")
    text = _read_sql(file) if file else "\n;\n".join(command) if command else None
    raise typer.Exit(sql_shell.run(loaded, text, output=output, quiet=quiet))


def _read_sql(file: Path) -> str:
    try:
        return file.read_text()
    except OSError as error:
        raise typer.BadParameter(f"can't read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise typer.BadParameter(f"{file} is not UTF-8 text") from None


@app.command()
def up(
    pg_port: Annotated[int | None, typer.Option(help="PostgreSQL wire port (5433).")] = None,
    http_port: Annotated[int | None, typer.Option(help="REST port (8000).")] = None,
    models: ModelsOption = None,
    postgres: PostgresOption = None,
    compute: Annotated[
        int, typer.Option(min=0, help="Nodes that prefill and decode, per model.")
    ] = 1,
    prefill: Annotated[int, typer.Option(min=0, help="Prefill-only nodes, per model.")] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Decode-only nodes, per model.")] = 0,
    dmp: Annotated[
        int, typer.Option(min=0, help="Memory pool nodes; each acts as a separate host.")
    ] = 1,
    workers: WorkersOption = None,
    on_ray: RayOption = None,
    meta: Annotated[int, typer.Option(min=1, help="Meta servers, with --ray.")] = 1,
    front: Annotated[int, typer.Option(min=0, help="Fronts, with --ray.")] = 1,
    keep: Annotated[bool, typer.Option(help="Keep the pool's KV in memory after a stop.")] = True,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Start a cluster on this machine and keep it running until Ctrl-C.

    Front, meta server, memory pool and compute nodes run as child processes and are restarted when
    they die. --prefill 1 --decode 1 replaces the default compute node by a split pair.

    With --ray, the processes run on the machines of a running Ray, one pool node on each, and the
    command returns when they answer (tierkv[ray], docs/operations.md).
    """
    from tierkv.commands.up import ClusterShape, run_cluster

    loaded = load(
        config,
        settings,
        front__pg_port=pg_port,
        front__http_port=http_port,
        front__postgres=postgres,
        front__workers=workers,
        **model_flags(models),
        dmp__remove_on_stop=None if keep else True,
    )
    if prefill or decode:
        if not (prefill and decode):
            raise typer.BadParameter("give --prefill and --decode together")
        compute = 0 if compute == 1 else compute
    if on_ray is not None:
        counts = {"meta": meta, "compute": compute, "prefill": prefill, "decode": decode}
        raise typer.Exit(start(loaded, on_ray, counts | {"front": front}))
    shape = ClusterShape(dmp=dmp, compute=compute, prefill=prefill, decode=decode)
    raise typer.Exit(asyncio.run(run_cluster(loaded, shape)))


@app.command()
def serve(
    role: Annotated[Role, typer.Argument(help="What to start.")],
    node_id: Annotated[
        str | None, typer.Option(help="Unique, stable name; default: ROLE-HOST.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of meta, dmp and compute nodes; 0: any.")
    ] = None,
    capacity: Annotated[
        str | None, typer.Option(help="Memory of a dmp node, such as 4GiB.")
    ] = None,
    postgres: PostgresOption = None,
    engine: Annotated[
        AnsweringEngine | None, typer.Option(help="Another engine that answers for a compute node.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="The engine's address: http://HOST:PORT.")] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the engine's API key.")
    ] = None,
    model: ModelOption = None,
    workers: WorkersOption = None,
    worker: Annotated[
        int | None, typer.Option("--worker", hidden=True, help="Number of this worker.")
    ] = None,
    supervised: Annotated[
        bool, typer.Option("--supervised", hidden=True, help="End when standard input closes.")
    ] = False,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Start one role of a cluster that spans machines, and run until stopped.

    Nodes find each other through the meta server: --set cluster.meta_address=HOST:PORT. A dmp node
    without a meta server serves programs that use only the pool (docs/pool.md).

    With --engine, a running vLLM, SGLang or any server with OpenAI's API answers for the node
    (docs/engines.md).

    Example: tierkv serve compute --engine vllm --url http://127.0.0.1:8000
    --set cluster.meta_address=HOST:PORT
    """
    from tierkv.commands.serve import run_on_loop, serve_role

    flags = role_flags(role, port, capacity, postgres, workers)
    flags |= engine_flags(role, engine, url, api_key_file, model)
    loaded = load(config, settings, **flags)
    name = node_id or ""
    serving = serve_role(loaded, role.value, node_id=name, supervised=supervised, worker=worker)
    loop = loaded.settings.front.event_loop if role is Role.FRONT else "asyncio"
    raise typer.Exit(run_on_loop(serving, loop))


@app.command()
def status(
    output: Annotated[OutputFormat, typer.Option("--format")] = OutputFormat.TABLE,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Show the nodes of the running cluster, their load and their cache."""
    from tierkv.commands.status import print_status

    raise typer.Exit(asyncio.run(print_status(load(config, settings).settings, output)))


@app.command()
def doctor(config: ConfigOption = None, settings: SetOption = None) -> None:
    """Report what is missing on this machine and how to get it."""
    from tierkv.commands.doctor import print_report

    raise typer.Exit(print_report(load(config, settings)))


@app.command("postgres-sql")
def postgres_sql() -> None:
    """Print the SQL that creates schema tierkv in a PostgreSQL database, to run by hand.

    Example: tierkv postgres-sql | psql app
    """
    from tierkv.dbfront.postgres.install import install_sql

    typer.echo(install_sql())


@app.command()
def demo(
    rows: Annotated[int, typer.Option(min=4, help="Records in the table.")] = 100,
    seed: Annotated[int, typer.Option(help="Seed of the generated records.")] = 7,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Compare runs with and without the cache: questions over the same notes, and a chat."""
    from tierkv.commands.demo import run_demo

    raise typer.Exit(run_demo(load(config, settings), rows=rows, seed=seed))


@app.command()
def calibrate(
    model: ModelOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text similar to the model's later prompts (20,000 tokens or more)."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="File or folder to write to; default: the --model folder.")
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Measure a model's KV and write the tables for entropy-coded KV.

    Example: tierkv calibrate --model ./Llama-3.1-8B --prompts sample.txt
    """
    from tierkv.commands.calibrate import calibrate as measure

    loaded = load(config, settings, compute__model=model)
    written = measure(loaded.settings.compute, prompts=prompts, out=out)
    typer.echo(f"wrote {written}; restart the nodes of this model to use it")


@config_app.command("show")
def config_show(
    config: ConfigOption = None,
    settings: SetOption = None,
    describe: Annotated[bool, typer.Option(help="Print the meaning of each setting.")] = True,
) -> None:
    """Print every setting, its value and the source of the value."""
    entries = list_entries(load(config, settings))
    width = max(len(entry.key) for entry in entries)
    for entry in entries:
        typer.echo(f"{entry.key:<{width}}  {entry.value}  ({entry.source})")
        if describe:
            typer.secho(f"{'':<{width}}  {entry.description}", dim=True)


@pool_app.command("stats")
def pool_stats(
    addresses: AddressOption,
    output: Annotated[OutputFormat, typer.Option("--format")] = OutputFormat.TABLE,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Show pool nodes, their transport paths and their contents."""
    from tierkv.commands import pool_shell

    pool_shell.print_stats(load(config, settings).settings, addresses, output)


@pool_app.command("put")
def pool_put(
    addresses: AddressOption,
    key: Annotated[str, typer.Argument(help="Key of the value; any text.")],
    file: Annotated[Path, typer.Argument(help="File to store.")],
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Store a file under a key."""
    from tierkv.commands import pool_shell

    raise typer.Exit(pool_shell.put(load(config, settings).settings, addresses, key, file))


@pool_app.command("get")
def pool_get(
    addresses: AddressOption,
    key: Annotated[str, typer.Argument(help="Key of the value.")],
    file: Annotated[
        Path | None, typer.Argument(help="File to write to; default: standard output.")
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Read a value; exit status 1 if the key is missing."""
    from tierkv.commands import pool_shell

    raise typer.Exit(pool_shell.get(load(config, settings).settings, addresses, key, file))


@pool_app.command("clean")
def pool_clean(config: ConfigOption = None, settings: SetOption = None) -> None:
    """Free the memory left by this stopped cluster and by clusters whose folder is gone."""
    from tierkv.processes import cluster_files

    cluster_files.clean(load(config, settings).settings)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        typer.echo(installed("tierkv"))
        raise typer.Exit
