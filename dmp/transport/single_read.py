"""Reading one range with the fewest instructions: on small gets, Python is most of the cost.

Used by dmp/transport/connection.py for reads of one range. One call sends the request, one takes
header, checksum and as much of the payload as came with them, one the rest.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

from tierkv.dmp.wire.frame import HEADER, HEADER_BYTES, MAGIC, PROTOCOL_VERSION, FrameType
from tierkv.dmp.wire.range_codec import ONE_RANGE_BYTES
from tierkv.dmp.wire.range_ref import Ref
from tierkv.dmp.wire.socket_io import Wire

_REQUEST: Final = struct.Struct("<4sBBHIIIIQIQQIQ")
_READ: Final = int(FrameType.READ)
_REPLY: Final = int(FrameType.REPLY)
LEAD_BYTES: Final = HEADER_BYTES + 8
PIECE_BYTES: Final = 256 << 10
"""Received and verified at a time: half of a usual L2 cache."""


class SingleRead:
    """Sends reads of one range over one wire; used by one thread at a time.

    Attributes:
        lead: header and checksum of the latest answer; or, if it was another one, its first bytes.
    """

    __slots__ = ("_wire", "lead")

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.lead = memoryview(bytearray(LEAD_BYTES))

    def read(self, request_id: int, ref: Ref, view: memoryview) -> int:
        """Ask for a range and take the beginning of the answer.

        Returns:
            How many bytes of ``view`` are filled.
        """
        lead = self.lead
        request = _REQUEST.pack(
            MAGIC, PROTOCOL_VERSION, _READ, 0, request_id, ONE_RANGE_BYTES, 0, 1, *ref
        )
        got = self._wire.ask(request, (lead, view))
        if got < LEAD_BYTES:
            self._wire.receive_into(lead[got:])
            got = LEAD_BYTES
        return got - LEAD_BYTES

    def is_answer(self, request_id: int, size: int) -> bool:
        """Whether ``lead`` begins the answer; else it is an error, or nonsense."""
        want = HEADER.pack(MAGIC, PROTOCOL_VERSION, _REPLY, 0, request_id, 8, size)
        return self.lead[:HEADER_BYTES] == want

    def finish(self, view: memoryview, got: int) -> bool:
        """Take the rest of the range; answers whether its bytes have the checksum sent with it."""
        size = len(view)
        if size <= PIECE_BYTES:
            if got < size:
                self._wire.receive_into(view[got:])
            found = xxhash.xxh3_64_intdigest(view)
        else:
            found = receive_hashed(self._wire, view, got)
        return found == int.from_bytes(self.lead[HEADER_BYTES:], "little")


def receive_hashed(wire: Wire, view: memoryview, got: int = 0) -> int:
    """Fill the rest of a view; hash each piece while it is in the cache and the next one comes."""
    state = xxhash.xxh3_64()
    if got:
        state.update(view[:got])
    for start in range(got, len(view), PIECE_BYTES):
        piece = view[start : start + PIECE_BYTES]
        wire.receive_into(piece)
        state.update(piece)
    return state.intdigest()
