"""The books of a relayed connection: what is owed, whatever pieces the bytes come in."""

from __future__ import annotations

import random

import pytest

from tierkv.dbfront.postgres.wire.conversation import Conversation
from tierkv.dbfront.postgres.wire.messages import framed

READY = framed(b"Z", b"I")
IN_BLOCK = framed(b"Z", b"T")
ROW = framed(b"D", b"\0\1\0\0\0\6Z\0\0\0\5I")  # data that looks like ReadyForQuery
COMPLETE = framed(b"C", b"SELECT 1\0")
ERROR = framed(b"E", b"SERROR\0C22012\0\0")
PARSED, BOUND, NO_DATA = framed(b"1"), framed(b"2"), framed(b"n")


def said(books: Conversation, kinds: str) -> None:
    for kind in kinds:
        books.client_frame(ord(kind))


def test_a_query_is_answered_by_ready() -> None:
    books = Conversation()
    said(books, "Q")
    assert books.waits_for_ready and not books.settled
    books.server_data(ROW + COMPLETE)
    assert not books.settled
    books.server_data(IN_BLOCK)
    assert books.settled and books.status == "T"


def test_a_batch_may_be_answered_before_its_sync() -> None:
    books = Conversation()
    said(books, "PBDE")
    assert books.in_batch
    books.server_data(PARSED + BOUND + NO_DATA)
    assert not books.settled
    books.server_data(COMPLETE)
    assert books.settled and books.in_batch
    said(books, "S")
    assert not books.settled and not books.in_batch
    books.server_data(READY)
    assert books.settled


def test_an_error_answers_all_up_to_the_sync() -> None:
    books = Conversation()
    said(books, "PBESPBES")
    books.server_data(PARSED + ERROR)
    assert books.failed and not books.settled
    books.server_data(READY)
    assert not books.failed and not books.settled
    books.server_data(PARSED + BOUND + COMPLETE + READY)
    assert books.settled


@pytest.mark.parametrize("told", [True, False])
def test_a_query_after_an_error_in_a_batch_is_not_answered(told: bool) -> None:
    books = Conversation()
    said(books, "P" if told else "PQF")
    books.server_data(ERROR)
    assert books.skipping and books.settled
    said(books, "QFS" if told else "S")
    assert not books.settled
    books.server_data(READY)
    assert books.settled and not books.skipping


def test_an_error_of_a_query_ends_with_its_own_ready() -> None:
    books = Conversation()
    said(books, "PBESQQ")
    books.server_data(PARSED + BOUND + COMPLETE + READY + ERROR)
    assert books.failed and not books.skipping
    books.server_data(READY)
    assert not books.settled
    books.server_data(COMPLETE + READY)
    assert books.settled


def test_a_sync_that_comes_early_in_copy_is_not_answered() -> None:
    books = Conversation()
    said(books, "PBES")
    books.server_data(PARSED + BOUND + framed(b"G", b"\0\0\0"))
    assert books.copying_in and not books.settled
    said(books, "dSdcS")
    assert not books.copying_in
    books.server_data(COMPLETE + READY)
    assert books.settled


def test_a_copy_that_fails_ends_at_the_next_sync() -> None:
    books = Conversation()
    said(books, "PBES")
    books.server_data(PARSED + BOUND + framed(b"G", b"\0\0\0"))
    said(books, "dd")
    books.server_data(ERROR)
    said(books, "dcS")
    assert not books.settled
    books.server_data(framed(b"Z", b"E"))
    assert books.settled and books.status == "E"


def test_settings_are_noted() -> None:
    books = Conversation()
    books.server_data(framed(b"S", b"client_encoding\0LATIN1\0"))
    assert books.parameters == {"client_encoding": "LATIN1"}


@pytest.mark.parametrize("seed", range(20))
def test_pieces_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    stream = b"".join(
        rng.choice([ROW, ROW, COMPLETE, framed(b"N", b"MZ\0\0\0\5I\0\0"), framed(b"S", b"a\0b\0")])
        for _ in range(50)
    )
    stream += IN_BLOCK
    whole, cut = Conversation(), Conversation()
    for books in (whole, cut):
        said(books, "Q")
    whole.server_data(stream)
    at = 0
    while at < len(stream):
        size = rng.choice([1, 2, 3, 7, 40])
        assert not cut.settled
        cut.server_data(stream[at : at + size])
        at += size
    assert whole.settled and cut.settled and cut.status == "T"
    assert whole.parameters == cut.parameters
