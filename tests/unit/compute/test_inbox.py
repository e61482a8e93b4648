"""Nothing that is put into an inbox is lost, and nobody who stops waiting can hurt its owner."""

from __future__ import annotations

from concurrent.futures import CancelledError

import pytest

from tierkv.compute.batching.inbox import Inbox
from tierkv.kvcore.errors import TransportError


def test_a_call_nobody_waits_for_any_more_is_skipped_and_hurts_nobody() -> None:
    inbox, ran = Inbox(), []
    given_up = inbox.call(lambda: ran.append("given up"))
    wanted = inbox.call(lambda: ran.append("wanted"))
    assert given_up.cancel()
    inbox.run_pending(wait=False, timeout_s=None)
    assert ran == ["wanted"]
    assert wanted.done()
    with pytest.raises(CancelledError):
        given_up.result(0)


def test_what_its_owner_leaves_behind_is_refused() -> None:
    inbox, refused = Inbox(), []
    queued = inbox.call(lambda: 1)
    inbox.post(lambda: refused.append("ran"), refused=lambda: refused.append("queued"))
    inbox.post(lambda: refused.append("ran"))
    inbox.close()
    inbox.post(lambda: refused.append("ran"), refused=lambda: refused.append("late"))
    assert refused == ["queued", "late"]
    for future in (queued, inbox.call(lambda: 2)):
        with pytest.raises(TransportError):
            future.result(0)
