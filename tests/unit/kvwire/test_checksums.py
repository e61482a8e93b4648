"""The checksum behind every message: damage is seen wherever it is, older peers are understood."""

from __future__ import annotations

import random

import pytest

from tierkv.kvcore.errors import TransportError
from tierkv.kvwire.checksums import intact, sealed, unsealed
from tierkv.kvwire.v1 import compute_pb2 as pb

REQUEST = pb.GenerateRequest(
    request_id="r",
    model="m",
    token_ids=range(0, 2_000, 7),
    namespace_key=bytes(range(32)),
    sampling=pb.SamplingParams(top_p=1.0, max_tokens=24),
)


def test_a_message_comes_out_as_it_went_in() -> None:
    for message in (b"", b"\0", REQUEST.SerializeToString()):
        assert unsealed(sealed(message)) == message


def test_any_single_flipped_bit_is_seen() -> None:
    raw = sealed(REQUEST.SerializeToString())
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        assert unsealed(bytes(damaged)) is None, f"bit {bit}"


def test_any_cut_message_that_kept_its_end_is_seen() -> None:
    raw = sealed(REQUEST.SerializeToString())
    chance = random.Random(5)
    for _ in range(200):
        start, stop = sorted(chance.sample(range(len(raw) - 15), 2))
        assert unsealed(raw[:start] + raw[stop:]) is None


def test_a_peer_without_checksums_reads_a_sealed_message_and_is_read() -> None:
    raw = REQUEST.SerializeToString()
    assert unsealed(raw) == raw
    assert unsealed(b"") == b"" and unsealed(b"short") == b"short"
    read = pb.GenerateRequest.FromString(sealed(raw))
    read.DiscardUnknownFields()
    assert read == REQUEST


def test_a_damaged_message_is_a_lost_peer_not_a_wrong_request() -> None:
    assert intact(REQUEST) is REQUEST
    with pytest.raises(TransportError, match="damaged"):
        intact(None)
