"""``tierkv namespace`` and ``tierkv key``: arguments and help.

tierkv/commands/tenants.py carries the verbs out, and is imported when one runs.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from tierkv.commands.options import (
    CapacityOption,
    ConfigOption,
    OnFull,
    OnFullOption,
    SetOption,
    Switch,
    TtlOption,
    is_on,
    load,
)
from tierkv.output import OutputFormat

namespace_app = typer.Typer(
    help="Set which tenants share KV, and how far answers may depart from exact ones.",
    no_args_is_help=True,
)

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
    from tierkv.commands.tenants import create_key

    asyncio.run(create_key(load(config, settings).settings, name, tenant or name))


@key_app.command("list")
def key_list(
    output: Annotated[OutputFormat, typer.Option("--format")] = OutputFormat.TABLE,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Show the keys of the running cluster, without their secrets."""
    from tierkv.commands.tenants import print_keys

    asyncio.run(print_keys(load(config, settings).settings, output))


@key_app.command("revoke")
def key_revoke(
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Remove a key; fronts refuse it within a second."""
    from tierkv.commands.tenants import revoke_key

    asyncio.run(revoke_key(load(config, settings).settings, name))


@namespace_app.command("list")
def namespace_list(
    output: Annotated[OutputFormat, typer.Option("--format")] = OutputFormat.TABLE,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Show the namespaces of the running cluster; other tenants use the namespace.* settings."""
    from tierkv.commands.tenants import print_namespaces

    asyncio.run(print_namespaces(load(config, settings).settings, output))


@namespace_app.command("show")
def namespace_show(
    name: Annotated[str, typer.Argument(help="Name of the namespace.")],
    output: Annotated[OutputFormat, typer.Option("--format")] = OutputFormat.TABLE,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Show one namespace."""
    from tierkv.commands.tenants import print_namespaces

    asyncio.run(print_namespaces(load(config, settings).settings, output, name))


@namespace_app.command("set")
def namespace_set(
    name: Annotated[
        str,
        typer.Argument(help="Name of the namespace; without --tenant, also the tenant using it."),
    ],
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            help="Tenant that uses the namespace; may be repeated. '': only the tenant NAME."
        ),
    ] = None,
    cache: Annotated[Switch | None, typer.Option(help="Store and reuse KV.")] = None,
    blend: Annotated[
        Switch | None,
        typer.Option(help="Reuse documents at any position; answers become approximate."),
    ] = None,
    recompute_ratio: Annotated[
        float | None,
        typer.Option(
            help="Least share of reused document tokens that is recomputed, in (0, 1]; 1 is exact."
        ),
    ] = None,
    selector: Annotated[
        str | None,
        typer.Option(help="How tokens to recompute are chosen: hkvd, query or boundary."),
    ] = None,
    gradual: Annotated[
        Switch | None,
        typer.Option(help="With hkvd: recompute more in early layers, fewer in late ones."),
    ] = None,
    kv_codec: Annotated[
        str | None,
        typer.Option(help="Encoding of KV below L1: none, fp8, int8 ...; default: each node's."),
    ] = None,
    capacity: CapacityOption = None,
    ttl: TtlOption = None,
    on_full: OnFullOption = None,
    output: Annotated[OutputFormat, typer.Option("--format")] = OutputFormat.TABLE,
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Create a namespace, or change only the given settings.

    Fronts apply changes within 5 s, pool nodes within 2 s.

    Example: tierkv namespace set default --blend on --recompute-ratio 0.2
    Example: tierkv namespace set red --tenant ann --tenant bob --capacity 4GiB --ttl 12h
    """
    from tierkv.commands.tenants import set_namespace
    from tierkv.dbfront.statement.namespace_change import NamespaceChange, read_duration, read_size

    change = NamespaceChange(
        tenants=None if tenant is None else tuple(filter(None, tenant)),
        cache=is_on(cache),
        blend=is_on(blend),
        recompute_ratio=recompute_ratio,
        selector=selector,
        gradual=is_on(gradual),
        kv_codec=kv_codec,
        capacity_bytes=read_size(capacity),
        ttl_s=read_duration(ttl),
        evicts=None if on_full is None else on_full is OnFull.EVICT,
    )
    asyncio.run(set_namespace(load(config, settings).settings, name, change, output))


@namespace_app.command("drop")
def namespace_drop(
    name: Annotated[str, typer.Argument(help="Name of the namespace.")],
    config: ConfigOption = None,
    settings: SetOption = None,
) -> None:
    """Remove a namespace. Its tenants share no KV any more, and have no limits."""
    from tierkv.commands.tenants import drop_namespace

    asyncio.run(drop_namespace(load(config, settings).settings, name))
