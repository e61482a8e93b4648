"""Every leaf of the error tree has its family's codes, a row in docs/errors.md, and pickles."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tierkv.kvcore import errors

ROOT = Path(__file__).parents[2]
FAMILIES = (errors.UserError, errors.RetryableError, errors.CacheError, errors.ProtocolError)


def _leaves(kind: type[errors.TierKVError]) -> Iterator[type[errors.TierKVError]]:
    below = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    if not below:
        yield kind
    for child in below:
        yield from _leaves(child)


LEAVES = sorted(set(_leaves(errors.TierKVError)), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_leaf_has_codes_of_its_family(kind: type[errors.TierKVError]) -> None:
    assert issubclass(kind, FAMILIES)
    assert re.fullmatch(r"[0-9A-Z]{5}", kind.sqlstate)
    assert kind.grpc_status in grpc.StatusCode.__members__
    if issubclass(kind, errors.UserError):
        assert 400 <= kind.http_status < 500
    assert kind.__doc__


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_leaf_has_a_row_in_the_error_table(kind: type[errors.TierKVError]) -> None:
    table = (ROOT / "docs/errors.md").read_text()
    row = next((line for line in table.splitlines() if f"`{kind.__name__}`" in line), "")
    assert f"`{kind.code}`" in row
    if not issubclass(kind, errors.CacheError):
        assert kind.sqlstate in row
        assert str(kind.http_status) in row


@pytest.mark.parametrize("kind", LEAVES, ids=lambda kind: kind.__name__)
def test_leaf_survives_pickling(kind: type[errors.TierKVError]) -> None:
    error = kind("what happened", detail="where", hint="do this")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), copy.detail, copy.hint) == ("what happened", "where", "do this")


def test_codes_are_unique() -> None:
    codes = [kind.code for kind in LEAVES]
    assert len(codes) == len(set(codes))


MISS = {
    "compute/tiers/tiers.py",
    "scheduler/dispatcher.py",
    "scheduler/directory_client.py",
    "scheduler/plans/planner.py",
    "scheduler/requests/stage_runner.py",
    "dmp/client/node_link.py",
}
"""Where a cache error becomes "compute it again", or a miss of the pool alone, and is counted."""

STEERING = {
    "scheduler/prompt_eraser.py",
    "scheduler/pins.py",
    "dbfront/generation/steering.py",
}
"""Calls about KV itself: a failure is told to the user, who wants to know what is left."""

NO_DIRECTORY = {
    "integrations/membership.py",
    "metaserver/agent.py",
    "metaserver/server_group.py",
    "metaserver/several_meta.py",
    "scheduler/nodes/cluster_view.py",
    "tierkv/parts/audit_writer.py",
    "tierkv/parts/front_part.py",
    "tierkv/parts/record_follower.py",
    "tierkv/commands/tenants.py",
    "tierkv/parts/front_source.py",
    "tierkv/parts/parts.py",
    "tierkv/processes/start_order.py",
    "tierkv/commands/status.py",
}
"""Shells whose own business is the directory: they try again or say that it is away."""

OWN_WIRE = {
    "dmp/server/client_connection.py",
    "dmp/node/gets.py",
    "dmp/transport/connection.py",
    "dmp/transport/connection_pool.py",
    "dmp/transport/shm.py",
}
"""The pool's two ends, which carry errors over its wire; reads that are good stay so when the node
can't be told of them."""


OWN_RDMA = {
    "dmp/server/rdma_door.py",
    "dmp/transport/verbs/lane.py",
    "dmp/transport/verbs/rail_board.py",
    "dmp/transport/verbs/node.py",
    "dmp/transport/verbs/device.py",
    "dmp/transport/verbs/fabric.py",
    "dmp/transport/verbs/link.py",
}
"""RDMA has a way out below the miss: another rail, or TCP."""


OWN_DISK = {
    "dmp/node/tiering.py",
    "storage/archive.py",
    "storage/archiver.py",
    "storage/l4.py",
    "storage/disk/segment_store.py",
}
"""Tier L4: the archive is a way out below a miss on disk; a batch answers each of its reads; what a
node can't copy down is tried again, what it can't bring up is a miss."""

OWN_VIEWS = {"scheduler/nodes/cluster_view.py"}
"""A node that does not answer a view is shown as of its last heartbeat."""
OWN_ENGINE = {"integrations/remote/keeper.py"}
"""Looks at a foreign engine that end in nothing: it is down, and waited for."""


def test_cache_errors_are_caught_only_where_they_mean_a_miss() -> None:
    kinds: list[type] = [errors.CacheError, *errors.CacheError.__subclasses__()]
    names = "|".join(kind.__name__ for kind in kinds)
    pattern = re.compile(rf"(?:except|suppress)\b[^\n:]*\b(?:{names})\b")
    rooms = (
        "compute", "integrations", "scheduler", "dbfront", "sql", "tierkv", "dmp", "metaserver",
        "storage",
    )  # fmt: skip
    found = {
        str(path.relative_to(ROOT))
        for room in rooms
        for path in (ROOT / room).rglob("*.py")
        if pattern.search(path.read_text())
    }
    assert (
        found
        <= MISS | STEERING | NO_DIRECTORY | OWN_WIRE | OWN_RDMA | OWN_DISK | OWN_ENGINE | OWN_VIEWS
    )
    assert found >= MISS
