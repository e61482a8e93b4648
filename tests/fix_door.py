"""Doors of engines to real pools, for tests; closed when their test ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import pytest

from tierkv.integrations.identity import EngineIdentity
from tierkv.integrations.pool_door import PoolDoor
from tierkv.integrations.settings import PoolAccess
from tierkv.kvcore.layout import BlockLayout, KvDtype

LAYOUT = BlockLayout(2, 2, 16, KvDtype.FLOAT32, 16, order="vllm-hnd-1")
IDENTITY = EngineIdentity("vllm", "0.32.0", "/models/tiny", "abc", LAYOUT)


class MakeDoor(Protocol):
    """Opens a door; ``changes`` are the identity's."""

    def __call__(self, given: dict[str, Any], **changes: Any) -> PoolDoor: ...


@pytest.fixture
def make_door() -> Iterator[MakeDoor]:
    opened: list[PoolDoor] = []

    def make(given: dict[str, Any], **changes: Any) -> PoolDoor:
        part = changes.pop("part", "")
        door = PoolDoor(PoolAccess.read(given), replace(IDENTITY, **changes), part=part)
        opened.append(door)
        door.start()
        return door

    yield make
    for door in opened:
        door.close()
