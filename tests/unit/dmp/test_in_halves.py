"""Large copies are shared by two threads; no thread works on after the call."""

from __future__ import annotations

import threading

import pytest

from tierkv.dmp.transport.shm import in_halves


@pytest.fixture
def many_cores(monkeypatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)


def test_all_items_are_worked_on_once_by_two_threads(many_cores) -> None:
    done: list[tuple[str, tuple[int, ...]]] = []

    def work(items) -> None:
        done.append((threading.current_thread().name, tuple(items)))

    in_halves(work, range(5), 8 << 20)
    assert sorted(items for _, items in done) == [(0, 2, 4), (1, 3)]
    assert len({name for name, _ in done}) == 2


@pytest.mark.parametrize("bad", [0, 1])
def test_an_error_of_either_thread_is_raised_when_both_have_ended(many_cores, bad) -> None:
    ended: list[int] = []

    def work(items) -> None:
        if items[0] == bad:
            raise ValueError(f"half {bad}")
        ended.append(items[0])

    with pytest.raises(ValueError, match=f"half {bad}"):
        in_halves(work, range(4), 8 << 20)
    assert ended == [1 - bad]


def test_small_copies_and_small_machines_use_one_thread(monkeypatch, many_cores) -> None:
    done: list[tuple[int, ...]] = []

    def work(items) -> None:
        done.append(tuple(items))

    in_halves(work, range(4), (8 << 20) - 1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    in_halves(work, range(4), 8 << 20)
    assert done == [(0, 1, 2, 3)] * 2
