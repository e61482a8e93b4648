"""Cutting a client's bytes: nothing is lost, nothing is passed before it was looked at."""

from __future__ import annotations

import random

import pytest

from tierkv.dbfront.postgres.statements.statement import may_matter
from tierkv.dbfront.postgres.wire import conversation
from tierkv.dbfront.postgres.wire.conversation import ClientFrames, Conversation
from tierkv.dbfront.postgres.wire.messages import execute, framed, parse, query
from tierkv.kvcore.errors import RemoteProtocolError

PLAIN = query(b"SELECT 1")
CALL = query(b"SELECT AI_Generate('x')")
COPY = framed(b"d", b"SELECT ai_generate(body) is only data here")
SYNC = framed(b"S")


def frames() -> ClientFrames:
    return ClientFrames(Conversation(), may_matter)


def test_chunks_pass_as_they_come() -> None:
    data = PLAIN + COPY * 3 + parse(b"", b"SELECT 2") + SYNC
    assert frames().feed(data) == (data, None)


def test_a_message_that_matters_is_given_out_whole() -> None:
    cutter = frames()
    cut = cutter.feed(PLAIN + CALL + PLAIN)
    assert cut == (PLAIN, CALL) and cutter.held == len(PLAIN)
    assert cutter.feed(b"") == (PLAIN, None)


def test_messages_that_name_things_matter_only_when_told() -> None:
    cutter = ClientFrames(Conversation(), lambda message: message[:1] == b"E")
    assert cutter.feed(execute(b"p")) == (execute(b"p"), None)
    cutter.names_matter = True
    assert cutter.feed(execute(b"p")) == (b"", execute(b"p"))


def test_a_statement_too_long_to_hold_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "_LONGEST_HELD", 100)
    long = query(b"SELECT ai_generate('x') -- " + b"." * 200)
    assert frames().feed(long) == (long, None)


@pytest.mark.parametrize("data", [b"Y\0\0\0\4", b"Q\0\0\0\3", b"Q\xff\xff\xff"])
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        frames().feed(data + b"\0" * 5 if data != b"Q\xff\xff\xff" else b"!" * 5)


@pytest.mark.parametrize("seed", range(20))
def test_pieces_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    script = [rng.choice([PLAIN, CALL, COPY, SYNC, parse(b"n", b"x" * 300)]) for _ in range(40)]
    stream = b"".join(script)
    cutter, passed, given = frames(), b"", []
    at = 0
    while at < len(stream):
        size = rng.choice([1, 3, 10, 60, 500])
        cut = cutter.feed(stream[at : at + size])
        at += size
        while True:
            passed += cut.passed
            if cut.message is None:
                break
            given.append(cut.message)
            passed += cut.message
            cut = cutter.feed(b"")
    assert passed == stream and cutter.held == 0
    assert given == [message for message in script if message == CALL]
