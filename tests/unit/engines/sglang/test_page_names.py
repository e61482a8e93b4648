"""Names of pages: another key, part, generation, pool or hash is another name."""

from __future__ import annotations

from tierkv.integrations.sglang.page_names import PageNames, generation_marker
from tierkv.kvcore.ids import NamespaceKey

BASE = NamespaceKey(bytes(range(32)))
HASH = "5e" * 32


def test_names_are_the_same_in_every_process() -> None:
    names = PageNames(BASE, ("tp 0 of 1", "pp 0 of 1"), 3)
    assert names.name(HASH).hex() == "d0a057f79e866251c53d0d276f9b1d7a"
    assert generation_marker(BASE, 3).hex() == "260258b9bc88e7fef241f8397d0f28da"


def test_whatever_differs_makes_another_name() -> None:
    other = NamespaceKey(bytes(32))
    names = [
        PageNames(BASE, ("a", "b"), 0).name(HASH),
        PageNames(other, ("a", "b"), 0).name(HASH),
        PageNames(BASE, ("ab", ""), 0).name(HASH),
        PageNames(BASE, ("a", "b", ""), 0).name(HASH),
        PageNames(BASE, ("a", "b"), 1).name(HASH),
        PageNames(BASE, ("a", "b"), 0).name(HASH, "mamba"),
        PageNames(BASE, ("a", "b"), 0).name(HASH[:-1]),
        PageNames(BASE, ("a", "b"), 0).name("\udc80 any text at all \x00"),
        generation_marker(BASE, 0),
        generation_marker(BASE, 1),
        generation_marker(other, 1),
    ]
    assert len(set(names)) == len(names)


def test_a_namer_is_not_changed_by_naming() -> None:
    names = PageNames(BASE, (), 0)
    first = names.name(HASH)
    names.name("else")
    assert names.name(HASH) == first
