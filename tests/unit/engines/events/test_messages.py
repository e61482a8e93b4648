"""Batches of engines' events, read or said to be unreadable."""

from __future__ import annotations

import math

import msgspec
import pytest

from tests.fix_engine_events import CLEARED, batch, payload, removed, stored
from tierkv.integrations.events.messages import EngineStored, decode_batch, token_numbers


def test_events_of_a_batch_come_in_order() -> None:
    got = decode_batch(7, payload(stored(range(8), None), removed(b"x"), CLEARED, time_s=2.5))
    assert (got.seq, got.time_s, got.readable) == (7, 2.5, True)
    assert [type(event).__name__ for event in got.events] == [
        "EngineStored",
        "EngineRemoved",
        "EngineCleared",
    ]


def test_fields_and_frames_of_later_versions_are_passed_over() -> None:
    later = stored(range(4), None) | {"locality": "LOCAL", "something_new": [1, {"a": 2}]}
    raw = msgspec.msgpack.encode([1.0, [later], 3, "and more"])
    got = decode_batch(0, raw)
    assert got.readable and len(got.events) == 1


def test_a_batch_with_an_event_of_an_unknown_kind_is_unreadable() -> None:
    got = decode_batch(0, payload(stored(range(4), None), {"type": "BlockMoved", "to": 1}))
    assert not got.readable


@pytest.mark.parametrize("raw", [b"", b"\xc1", b"\x93", msgspec.msgpack.encode({"a": 1})])
def test_what_is_no_batch_is_unreadable(raw: bytes) -> None:
    got = decode_batch(4, raw)
    assert (got.seq, got.readable, got.events) == (4, False, ())


def test_values_nested_too_deep_are_unreadable() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    event = msgspec.msgpack.encode(stored(range(4), None) | {"later": msgspec.Raw(deep)})
    got = decode_batch(3, msgspec.msgpack.encode([1.0, [msgspec.Raw(event)], 0]))
    assert (got.seq, got.readable, got.events) == (3, False, ())


def test_a_time_that_is_no_number_is_none() -> None:
    assert decode_batch(0, payload(time_s=math.nan)).time_s == 0.0


def test_equal_bytes_have_equal_digests() -> None:
    assert batch(1, CLEARED).digest == batch(1, CLEARED).digest
    assert batch(1, CLEARED).digest != batch(1, CLEARED, time_s=1.5).digest


@pytest.mark.parametrize(
    "tokens",
    [[1, 2, 3], [1, 2, 3, 4, 5], [[1, 2]] * 4, ["a"] * 4, [-1, 2, 3, 4], [1 << 32, 2, 3, 4], None],
)
def test_tokens_that_do_not_fill_the_blocks_are_none(tokens: object) -> None:
    event = batch(0, stored(range(4), None) | {"token_ids": tokens}).events[0]
    assert isinstance(event, EngineStored)
    assert token_numbers(event) is None
