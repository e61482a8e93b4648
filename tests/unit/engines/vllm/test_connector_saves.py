"""Saved blocks name the one before them: the pool lets ends of chains go before their heads."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.integrations.vllm.connector_book import RequestBook
from tierkv.kvcore.block import ROOT_PARENT, block_keys
from tierkv.kvcore.ids import NamespaceKey

NAMESPACE = NamespaceKey(bytes(range(32)))


@dataclass
class Request:
    request_id: str = "r"
    num_computed_tokens: int = 0
    all_token_ids: list[int] = field(default_factory=lambda: list(range(40)))


def test_each_saved_block_names_its_parent_and_its_depth() -> None:
    book = RequestBook(block_tokens=8, known_limit=100)
    request = Request()
    story = book.open(request, NAMESPACE)
    keys = block_keys(NAMESPACE, request.all_token_ids, block_tokens=8)
    first = book.saves(story, 2, [10, 11], computed=0)
    rest = book.saves(story, 4, [10, 11, 12, 13], computed=16)
    saves = [*first, *rest]
    assert [save.key for save in saves] == keys[:4]
    assert [save.parent for save in saves] == [ROOT_PARENT, *keys[:3]]
    assert [save.depth for save in saves] == [0, 1, 2, 3]
    assert [save.block_id for save in saves] == [10, 11, 12, 13]
