"""Transfers are kept until SGLang asks, and not for ever."""

from __future__ import annotations

from tierkv.integrations.sglang.host_pages import TransferBook


def test_transfers_are_told_once() -> None:
    book = TransferBook()
    book.add(is_read=True, pages=3, size_bytes=3 * 10**9, seconds=2.0)
    book.add(is_read=False, pages=1, size_bytes=10**9, seconds=0.5)
    book.add(is_read=False, pages=0, size_bytes=0, seconds=0.5)
    assert book.take() == ([(3, 1.5)], [(1, 2.0)])
    assert book.take() == ([], [])


def test_what_nobody_asks_for_does_not_grow() -> None:
    book = TransferBook()
    for number in range(5_000):
        book.add(is_read=True, pages=number + 1, size_bytes=1, seconds=0.0)
    reads, _ = book.take()
    assert len(reads) == 4_096 and reads[-1][0] == 5_000
