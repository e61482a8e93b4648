"""What the pool is told of pages: what each continues, so that ends are evicted before heads."""

from __future__ import annotations

from tierkv.integrations.sglang.page_store import Page, chain_notes
from tierkv.kvcore.block import ROOT_PARENT, Owner
from tierkv.kvcore.ids import BlockKey

ACME = Owner("large", "acme")
A, B, C = (BlockKey(bytes([n]) * 16) for n in (1, 2, 3))


def test_each_page_continues_the_one_before_it() -> None:
    notes = chain_notes([B, C], [A], tokens=64, owner=ACME)
    assert [(note.parent, note.outlook.depth) for note in notes] == [(A, 1), (B, 2)]
    assert {(note.tokens, note.owner) for note in notes} == {(64, ACME)}


def test_where_nothing_is_known_of_before_the_first_is_a_head() -> None:
    [first, second] = chain_notes([A, B], [], tokens=64, owner=ACME)
    assert (first.parent, first.outlook.depth, second.parent) == (ROOT_PARENT, 0, A)
    assert chain_notes([], [A], tokens=64, owner=ACME) == []


def test_a_page_is_as_large_as_its_pieces() -> None:
    assert Page(A, [memoryview(b"1234"), memoryview(b"5678")]).size == 8
