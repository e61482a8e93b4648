"""Fuzz the data plane's parsers: any bytes are refused with RemoteProtocolError, or are a message.

``python tests/fuzz/fuzz_frame.py [seconds]`` mutates valid messages at random; with atheris
installed (a Python it has wheels for), ``--atheris`` lets coverage guide it: see README.md.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tierkv.dmp.pool_node import NO_DISK, PoolNodeStats
from tierkv.dmp.wire import messages as m
from tierkv.dmp.wire.frame import FrameType, pack_header, parse_header
from tierkv.dmp.wire.range_codec import pack_ranges, unpack_ranges, unpack_sums
from tierkv.kvcore.block import BlockSpec, Location, Owner, RangeShape
from tierkv.kvcore.errors import RemoteProtocolError
from tierkv.kvcore.ids import BlockKey, HostId, Incarnation, NodeId
from tierkv.kvwire.frames import HEADER_BYTES

NODE = NodeId("dmp-a")
_PLACE = Location(NODE, Incarnation(7), 0, 3, 9, 10)
_PUT = BlockSpec(
    BlockKey(b"k" * 16),
    BlockKey(bytes(16)),
    64,
    ranges=RangeShape(5, 2),
    owner=Owner("model", "tenant"),
)

PARSERS: tuple[tuple[Callable[[bytes], object], bytes], ...] = (
    (lambda raw: _header(raw), pack_header(FrameType.READ, 1, head_bytes=44)),
    (unpack_ranges, pack_ranges([(7, 0, 3, 9, 1, 5), (7, 0, 3, 9, 0, 5)])),
    (lambda raw: unpack_sums(raw, 2), bytes(16)),
    (m.Hello.unpack, m.Hello("token", "c0ffee").pack()),
    (m.Welcome.unpack, m.Welcome(NODE, HostId("h"), Incarnation(7), "/dev/shm/x").pack()),
    (m.BlockLookup.unpack, m.BlockLookup([_PUT.key, _PUT.parent]).pack()),
    (m.Reserve.unpack, m.Reserve(1.5, [_PUT]).pack()),
    (m.Put.unpack, m.Put([_PUT]).pack()),
    (lambda raw: m.Seal.unpack(raw, NODE), m.Seal([m.Sealing(_PLACE, (1, 2))]).pack()),
    (lambda raw: m.Ranges.unpack(raw, NODE), m.Ranges([m.RangeRef(_PLACE, 1)]).pack()),
    (lambda raw: m.Refs.unpack(raw, NODE), m.Refs([_PLACE], 2.0).pack()),
    (lambda raw: m.MaybeRefs.unpack(raw, NODE), m.MaybeRefs([_PLACE, None]).pack()),
    (m.Flags.unpack, m.Flags([True, False]).pack()),
    (m.ErrorReply.unpack, m.ErrorReply("code", "message").pack()),
    (m.unpack_stats, m.pack_stats(PoolNodeStats(NO_DISK))),
)


def _header(raw: bytes) -> object:
    """Parse as much as a header has; the reader never hands over less."""
    return parse_header(raw[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), trusted=len(raw) % 2 == 0)


def one_input(data: bytes) -> None:
    """Feed the parser that the first byte names with the rest; anything but a refusal escapes."""
    if not data:
        return
    parse, _ = PARSERS[data[0] % len(PARSERS)]
    try:
        parse(data[1:])
    except RemoteProtocolError:
        return


def mutate(raw: bytearray, dice: random.Random) -> bytes:
    """Flip, cut, repeat or overwrite a few bytes."""
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(raw) + 1)
        choice = dice.randrange(4)
        if choice == 0 and at < len(raw):
            raw[at] ^= 1 << dice.randrange(8)
        elif choice == 1:
            del raw[at : at + dice.randint(1, 8)]
        elif choice == 2:
            raw[at:at] = raw[at : at + dice.randint(1, 16)]
        else:
            raw[at : at + 4] = dice.choice([b"\xff" * 4, bytes(4), b"\0\0\0\x80", b"\0\x20\0\0"])
    return bytes(raw)


def run_random(seconds: float, seed: int = 1) -> int:
    """Mutate valid messages for a while; answers how many inputs were tried."""
    dice = random.Random(seed)
    end = time.monotonic() + seconds
    tried = 0
    while tried % 1000 or time.monotonic() < end:
        which = dice.randrange(len(PARSERS))
        one_input(bytes([which]) + mutate(bytearray(PARSERS[which][1]), dice))
        tried += 1
    return tried


def main() -> None:
    """Run for the seconds asked for, or under atheris until it finds something."""
    if "--atheris" in sys.argv:
        import atheris  # On demand only: it has no wheels for some of our Pythons.

        sys.argv.remove("--atheris")
        atheris.instrument_all()
        atheris.Setup(sys.argv, one_input)
        atheris.Fuzz()
        return
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    print(f"{run_random(seconds)} inputs, none escaped")


if __name__ == "__main__":
    main()
