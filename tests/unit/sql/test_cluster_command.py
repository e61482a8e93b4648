"""Statements about KV namespaces, read from their tokens."""

from __future__ import annotations

import pytest

from tierkv.dbfront.statement.namespace_change import change_of
from tierkv.kvcore.errors import SqlError, SqlSyntaxError, UserError
from tierkv.metaserver.client import KvLimits, Namespace
from tierkv.sql.cluster_command import ClusterCommand, cluster_command
from tierkv.sql.text.lexer import tokenize


def read(sql: str) -> ClusterCommand | None:
    return cluster_command(tokenize(sql))


def test_options_are_read_with_their_places() -> None:
    command = read(
        "create kv namespace Red with (tenants = ('ann', 'bob'), capacity='4GiB', BLEND = on)"
    )
    assert command is not None and (command.tag, command.name) == ("CREATE KV NAMESPACE", "red")
    assert [(o.name, o.value, o.position) for o in command.options] == [
        ("tenants", "ann,bob", 31), ("capacity", "4GiB", 57), ("blend", "on", 74),
    ]  # fmt: skip


def test_names_may_be_quoted_and_statements_tolerant() -> None:
    command = read('DROP KV NAMESPACE IF EXISTS "Team.A"')
    assert command == ClusterCommand("DROP", "Team.A", (), tolerant=True)
    assert read("CREATE KV NAMESPACE IF NOT EXISTS x") == ClusterCommand(
        "CREATE", "x", (), tolerant=True
    )


@pytest.mark.parametrize("sql", ["CREATE TABLE kv (namespace int)", "DROP NAMESPACE x", "", "KV"])
def test_other_statements_are_none_of_them(sql: str) -> None:
    assert read(sql) is None


@pytest.mark.parametrize(
    ("sql", "says", "position"),
    [
        ("CREATE KV NAMESPACE", "expected a namespace's name at end of input", 20),
        ("CREATE KV NAMESPACE 'x'", "expected a namespace's name at or near", 21),
        ("CREATE KV NAMESPACE IF EXISTS x", "expected NOT EXISTS", 24),
        ("CREATE KV NAMESPACE x WITH capacity = 1", 'expected "("', 28),
        ("CREATE KV NAMESPACE x WITH (capacity = '1GiB'", 'expected ")" at end', 46),
        ("CREATE KV NAMESPACE x WITH (ttl = 1, ttl = 2)", "option ttl is given twice", 38),
        ("CREATE KV NAMESPACE x WITH (ttl = )", "expected a value", 35),
        ("CREATE KV NAMESPACE x y", "unexpected text", 23),
        ("ALTER KV NAMESPACE x", "expected SET", 21),
        ("DROP KV NAMESPACE x WITH (ttl = 1)", "unexpected text", 21),
    ],
)
def test_what_is_malformed_is_said_with_its_place(sql: str, says: str, position: int) -> None:
    with pytest.raises(SqlSyntaxError) as caught:
        read(sql)
    assert says in caught.value.message and caught.value.position == position


def test_a_change_has_the_options_values_and_no_others() -> None:
    command = read("ALTER KV NAMESPACE x SET (capacity = 2MiB, ttl = '5min', on_full = refuse)")
    assert command is not None
    before = Namespace("x", ("ann",), cache_enabled=False)
    after = change_of(command.options).applied_to(before)
    assert after.limits == KvLimits(2 << 20, 300.0, evicts=False)
    assert (after.tenants, after.cache_enabled, after.policy) == (
        before.tenants, False, before.policy
    )  # fmt: skip


def test_one_option_needs_no_parentheses() -> None:
    command = read("ALTER KV NAMESPACE x SET VERSION 'r2'")
    assert command is not None and command == read("alter kv namespace x set version = 'r2'")
    before = Namespace("x", limits=KvLimits(1 << 20, eviction="lfu"))
    after = change_of(command.options).applied_to(before)
    assert after.limits == KvLimits(1 << 20, eviction="lfu", version="r2")
    command = read("ALTER KV NAMESPACE x SET (eviction = node, disk_capacity = '1GiB')")
    assert command is not None
    changed = change_of(command.options).applied_to(after)
    assert changed.limits == KvLimits(1 << 20, version="r2", disk_capacity_bytes=1 << 30)


def test_rates_weight_and_medium() -> None:
    command = read(
        "CREATE KV NAMESPACE x WITH (read_bandwidth = '200MB/s', write_bandwidth = '1GiB', "
        "iops = 5000, weight = 2.5, media = disk, model = 'large')"
    )
    assert command is not None
    made = change_of(command.options).applied_to(Namespace("x"))
    assert made.limits == KvLimits(
        read_bytes_per_s=200_000_000, write_bytes_per_s=1 << 30, requests_per_s=5000.0,
        weight=2.5, media="disk", model="large",
    )  # fmt: skip
    command = read(
        "ALTER KV NAMESPACE x SET (media = both, iops = 0, read_bandwidth = 0, model = all)"
    )
    assert command is not None
    changed = change_of(command.options).applied_to(made)
    assert changed.limits == KvLimits(write_bytes_per_s=1 << 30, weight=2.5)


@pytest.mark.parametrize(
    ("option", "says", "hint"),
    [
        ("capacty = '1GiB'", "unknown option capacty", "capacity"),
        ("capacity = '9999PiB'", "is too large", "1EiB"),
        ("capacity = 'much'", "'much' is no size", "4GiB"),
        ("blend = perhaps", "blend = 'perhaps' must be on or off", ""),
        ("eviction = fifo2", "there is no eviction policy 'fifo2'", "fifo"),
        ("version = 'r 2'", "version = 'r 2' must be 1 to 128 letters", ""),
        ("disk_capacity = lots", "'lots' is no size", "4GiB"),
        ("read_bandwidth = fast", "'fast' is no bandwidth", "200MB/s"),
        ("iops = many", "iops = 'many' must be a number from 0", ""),
        ("weight = 0", "weight = '0' must be a number from 0.01 to 1000", ""),
        ("weight = 'nan'", "weight = 'nan' must be a number", ""),
        ("media = memroy", "there is no medium 'memroy'", "memory"),
        ("model = 'a model'", "'a model' is no name of a model", "tierkv.models"),
        ("on_full = burst", "on_full = 'burst' must be evict or refuse", ""),
        ("recompute_ratio = high", "recompute_ratio = 'high' is not a number", ""),
    ],
)
def test_values_that_can_not_be_name_their_option(option: str, says: str, hint: str) -> None:
    command = read(f"CREATE KV NAMESPACE x WITH ({option})")
    assert command is not None
    with pytest.raises(UserError) as caught:
        change_of(command.options)
    assert says in caught.value.message and hint in caught.value.hint
    assert caught.value.position == 29


def test_what_roles_own_is_dropped_or_given() -> None:
    dropped = read('DROP OWNED BY ann, "Bob" CASCADE')
    assert dropped is not None and dropped.right is not None
    assert (dropped.tag, dropped.right.roles) == ("DROP OWNED", ("ann", "Bob"))
    given = read("reassign owned by ann to bob")
    assert given is not None and given.right is not None
    assert (given.tag, given.right.roles, given.right.names) == (
        "REASSIGN OWNED", ("ann",), ("bob",),
    )  # fmt: skip
    with pytest.raises(SqlSyntaxError, match="expected TO"):
        read("REASSIGN OWNED BY ann")
    assert cluster_command(tokenize("DROP OWNED BY ann"), keeps_roles=False) is None


def test_a_right_of_current_user_needs_the_roles_name() -> None:
    """Where a server knows the role, the front does not; the embedded database's dialect does."""
    with pytest.raises(SqlError, match="CURRENT_USER can't be named") as refused:
        read("GRANT EXECUTE ON FUNCTION ai_filter TO current_user")
    assert (refused.value.sqlstate, refused.value.position) == ("0A000", 40)
    command = read('GRANT EXECUTE ON FUNCTION ai_filter TO "current_user"')
    assert command is not None and command.name == "current_user"
