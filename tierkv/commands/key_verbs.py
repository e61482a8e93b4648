"""The verbs of ``tierkv key``; tierkv/commands/keys.py carries them out."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from tierkv.commands.options import ConfigOption, SetOption, load
from tierkv.output import OutputFormat

key_app = typer.Typer(help="Make, list and revoke keys of REST clients.", no_args_is_help=True)


@key_app.command("create")
def key_create(
    name: Annotated[str, typer.Argument(help="Name of the key, for lists and limits.")],
    tenant: Annotated[
        str | None,
        typer.Option(help="SQL user on whose behalf the key acts; default: NAME."),
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Make a key and print it once; the cluster keeps its hash.

    From the first key on, REST clients need one.

    Example: tierkv key create crm --tenant sales
    """
    from tierkv.commands.keys import create_key

    asyncio.run(create_key(load(config, settings).settings, name, tenant or name))


@key_app.command("list")
def key_list(
    output: Annotated[OutputFormat, typer.Option("--format")] = OutputFormat.TABLE,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Show the keys of the running cluster, without their secrets."""
    from tierkv.commands.keys import print_keys

    asyncio.run(print_keys(load(config, settings).settings, output))


@key_app.command("revoke")
def key_revoke(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Remove a key; fronts refuse it within a second."""
    from tierkv.commands.keys import revoke_key

    asyncio.run(revoke_key(load(config, settings).settings, name))
