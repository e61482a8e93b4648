"""Windows into host memory: in place, in the order of a flat page, never outside of the pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tierkv.integrations.sglang.host_pages import HostPages, page_memory

PAGE, LAYERS, WIDTH, TOKENS = 4, 3, 5, 16


class LayerFirst:
    """A host pool as SGLang's, keys and values of three layers, layer by layer."""

    page_size = PAGE

    def __init__(self, shift: int = 0, size: int = PAGE * WIDTH * 2) -> None:
        numbers = torch.arange(2 * LAYERS * TOKENS * WIDTH, dtype=torch.int16)
        self.kv_buffer = numbers.reshape(2, LAYERS, TOKENS, WIDTH)
        self._shift, self._size = shift, size

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        row = WIDTH * 2
        addresses = [
            self.kv_buffer.data_ptr() + self._shift + ((part * LAYERS + layer) * TOKENS + i) * row
            for i in indices[::PAGE].tolist()
            for layer in range(LAYERS)
            for part in range(2)
        ]
        return addresses, [self._size] * len(addresses)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * LAYERS * PAGE * WIDTH, dtype=torch.int16)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.kv_buffer[:, :, index : index + PAGE].flatten()

    def set_from_flat_data_page(self, index: int, page: torch.Tensor) -> None:
        self.kv_buffer[:, :, index : index + PAGE] = page.reshape(2, LAYERS, PAGE, WIDTH)


class Uneven(LayerFirst):
    """One whose pages have pieces of two sizes."""

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses, sizes = super().get_page_buffer_meta(indices)
        return addresses, [size - 2 * (i % 2) for i, size in enumerate(sizes)]


class Scattered(LayerFirst):
    """One with a tensor of its own for each layer, wherever there was room for it."""

    def __init__(self, places: list[int]) -> None:
        super().__init__()
        room = torch.zeros(LAYERS, TOKENS, WIDTH, dtype=torch.int16)
        self.layers = [room[place] for place in places]
        for layer, tensor in enumerate(self.layers):
            tensor[:] = layer

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        return self.layers

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        addresses = [layer[i].data_ptr() for i in indices[::PAGE].tolist() for layer in self.layers]
        return addresses, [self._size] * len(addresses)


def tokens(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(PAGE) + page * PAGE for page in pages])


def test_windows_are_in_place_and_in_the_order_of_a_flat_page() -> None:
    host = LayerFirst()
    pages = HostPages(host)
    assert (pages.pieces, pages.piece_bytes, pages.copied) == (6, 40, False)
    assert [m.nbytes for m in pages.memory] == [host.kv_buffer.nbytes]
    found = pages.windows(tokens(2, 0), 2)
    for windows, first in zip(found, (8, 0), strict=True):
        flat = page_memory(host.get_data_page(first))
        assert b"".join(windows) == bytes(flat)
    found[0][0][:2] = b"\x07\x00"
    assert host.kv_buffer[0, 0, 8, 0] == 7


@pytest.mark.parametrize("places", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_tensors_come_in_their_order_wherever_they_lie(places: list[int]) -> None:
    (windows,) = HostPages(Scattered(places)).windows(tokens(1), 1)
    assert [window[0] for window in windows] == [0, 1, 2]


@pytest.mark.parametrize("host", [LayerFirst(shift=-64), LayerFirst(shift=1_000_000)])
def test_an_address_outside_of_the_pool_is_refused(host: Any) -> None:
    pages = HostPages(host)
    with pytest.raises(ValueError, match="outside of its host pool"):
        pages.windows(tokens(0), 1)


def test_a_window_that_leaves_the_pool_is_refused() -> None:
    pages = HostPages(LayerFirst(shift=PAGE * WIDTH * 2 - 2))
    assert len(pages.windows(tokens(0), 1)[0]) == 6
    with pytest.raises(ValueError, match="outside of its host pool"):
        pages.windows(tokens(3), 1)


@pytest.mark.parametrize(("indices", "count"), [(tokens(0), 2), (tokens(0)[:3], 1)])
def test_indices_must_be_whole_pages(indices: torch.Tensor, count: int) -> None:
    with pytest.raises(ValueError, match=f"for {count} pages of 4 tokens"):
        HostPages(LayerFirst()).windows(indices, count)


def test_pages_of_uneven_pieces_are_copied() -> None:
    host = Uneven()
    pages = HostPages(host)
    assert (pages.pieces, pages.page_bytes, pages.copied) == (1, 240, True)
    copies = [bytes(copy) for copy in pages.copy_out(tokens(1, 3), 2)]
    assert copies[0] == bytes(page_memory(host.get_data_page(4)))
    blank = pages.blank(2)
    page_memory(blank[0])[:] = copies[0]
    before = host.kv_buffer.clone()
    host.kv_buffer[:, :, 4:8] = 0
    pages.copy_in(tokens(1, 3), [blank[0], None])
    assert torch.equal(host.kv_buffer, before)


def test_a_pool_without_bytes_is_refused() -> None:
    class Logical:
        page_size = PAGE

        def get_dummy_flat_data_page(self) -> torch.Tensor:
            return torch.zeros(0)

    with pytest.raises(ValueError, match="a page has 0 bytes"):
        HostPages(Logical())


def test_a_tensor_with_gaps_has_no_memory() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        page_memory(torch.zeros(4, 4).t())
