from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from tierkv.dmp.server.client_connection import Clients


def test_what_a_client_has_is_freed_with_its_last_connection() -> None:
    clients = Clients()
    freed: list[str] = []
    clients.joined("a")
    clients.joined("a")
    clients.left("a", freed.append)
    assert freed == []
    clients.left("a", freed.append)
    assert freed == ["a"]


def test_a_client_that_connects_again_keeps_what_it_gets_then() -> None:
    clients = Clients()
    freeing, go_on = threading.Event(), threading.Event()
    order: list[str] = []

    def free(client_id: str) -> None:
        freeing.set()
        go_on.wait(0.1)
        order.append("freed")

    def come_back() -> None:
        freeing.wait()
        clients.joined("a")
        order.append("joined")
        go_on.set()

    clients.joined("a")
    with ThreadPoolExecutor(1) as threads:
        back = threads.submit(come_back)
        clients.left("a", free)
        back.result()
    assert order == ["freed", "joined"]
