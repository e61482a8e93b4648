from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.dmp.transport.verbs.link import SendWindow


def test_every_nth_and_the_last_are_signalled() -> None:
    window = SendWindow(total=7, depth=8, signal_every=3)
    assert [window.post() for _ in range(7)] == [
        (0, False), (1, False), (2, True), (3, False), (4, False), (5, True), (6, True),
    ]  # fmt: skip
    assert not window.has_room
    window.complete(5)
    assert not window.is_finished
    window.complete(6)
    assert window.is_finished


def test_nothing_to_do_is_finished() -> None:
    window = SendWindow(total=0, depth=4, signal_every=2)
    assert window.is_finished and not window.has_room


@given(st.integers(1, 200), st.integers(1, 64), st.data())
def test_it_always_ends_and_never_exceeds_its_depth(
    total: int, depth: int, data: st.DataObject
) -> None:
    window = SendWindow(total, depth, data.draw(st.integers(1, depth)))
    signalled: list[int] = []
    while not window.is_finished:
        while window.has_room:
            number, asked = window.post()
            signalled += [number] if asked else []
        assert window.posted - window.completed <= depth
        assert signalled, "in flight, but nobody will tell"
        window.complete(signalled.pop(data.draw(st.integers(0, len(signalled) - 1))))
        signalled = [n for n in signalled if n >= window.completed]
    assert window.posted == total
