"""Which batches are believed: gaps, replays, restarts, with and without somebody to ask."""

from __future__ import annotations

from tests.fix_engine_events import CLEARED, batch
from tierkv.integrations.events.following import (
    AskReplay,
    Following,
    Forget,
    Hide,
    Instruction,
    Show,
    Take,
)
from tierkv.integrations.events.messages import EngineBatch, decode_batch


def started(batches: int = 3, *, replays: bool = True) -> Following:
    """Return one that heard some batches of a first life."""
    following = Following(replays=replays)
    following.connected()
    following.replay_ended()
    for seq in range(batches):
        assert following.live(batch(seq)) == [Take(batch(seq))]
    return following


def taken(instructions: list[Instruction]) -> list[int]:
    """Return the numbers of the batches to enter."""
    return [step.batch.seq for step in instructions if isinstance(step, Take)]


def younger(seq: int) -> EngineBatch:
    """Return a batch of a later life."""
    return batch(seq, CLEARED, time_s=100.0 + seq)


def test_a_late_listener_is_told_everything_from_the_beginning() -> None:
    following = Following(replays=True)
    assert following.connected() == [Forget(), AskReplay(0)]
    assert following.live(batch(2)) == []
    assert [following.replayed(batch(n)) for n in range(3)] == [[Take(batch(n))] for n in range(3)]
    assert following.replay_ended() == []
    assert following.complete
    assert taken(following.live(batch(3))) == [3]


def test_what_came_during_a_replay_follows_it() -> None:
    following = Following(replays=True)
    following.connected()
    following.live(batch(1))
    following.live(batch(2))
    following.replayed(batch(0))
    assert taken(following.replay_ended()) == [1, 2]


def test_a_gap_is_filled_by_a_replay() -> None:
    following = started()
    assert following.live(batch(5)) == [AskReplay(2)]
    assert following.replayed(batch(2)) == [Show()]
    assert taken(following.replayed(batch(3))) == [3]
    assert taken(following.replayed(batch(4))) == [4]
    assert taken(following.replay_ended()) == [5]
    assert following.counts == {"gaps": 1, "replays": 2}
    assert following.complete


def test_a_gap_that_nobody_fills_voids_what_was_known() -> None:
    following = started()
    following.live(batch(5))
    following.live(batch(6))
    assert following.replay_failed() == [Forget(), Take(batch(5)), Take(batch(6))]
    assert not following.complete
    assert following.counts["losses"] == 1


def test_a_gap_is_a_loss_where_nothing_is_replayed() -> None:
    following = started(replays=False)
    assert following.live(batch(5)) == [Forget(), Take(batch(5))]
    assert not following.complete
    assert following.check() == []


def test_a_gap_that_reaches_beyond_what_is_kept_voids_what_was_known() -> None:
    following = started()
    following.live(batch(9))
    assert following.replayed(batch(7)) == [Forget(), Take(batch(7))]
    assert taken(following.replayed(batch(8))) == [8]
    assert taken(following.replay_ended()) == [9]
    assert not following.complete and following.counts["losses"] == 1


def test_a_lost_connection_hides_what_is_known_until_the_same_life_is_proven() -> None:
    following = started()
    assert following.disconnected() == [Hide()]
    assert following.connected() == [AskReplay(2)]
    assert following.replayed(batch(2)) == [Show()]
    assert following.replay_ended() == []
    assert following.complete and not following.counts["restarts"]


def test_a_new_life_with_fewer_batches_begins_with_nothing() -> None:
    following = started()
    following.disconnected()
    following.connected()
    assert following.replay_ended() == [Forget(), AskReplay(0)]
    assert taken(following.replayed(younger(0))) == [0]
    assert following.replay_ended() == []
    assert following.counts["restarts"] == 1
    assert taken(following.live(younger(1))) == [1]


def test_a_new_life_with_more_batches_is_told_by_their_bytes() -> None:
    following = started()
    following.disconnected()
    following.connected()
    assert following.replayed(younger(2)) == [Forget(), AskReplay(0)]
    assert [taken(following.replayed(younger(n))) for n in range(4)] == [[0], [1], [2], [3]]


def test_a_reconnection_without_replay_begins_with_nothing() -> None:
    following = started(replays=False)
    following.disconnected()
    assert following.connected() == [Forget()]
    assert taken(following.live(batch(0))) == [0]
    assert following.complete


def test_a_number_that_goes_back_is_a_new_life_where_nothing_is_replayed() -> None:
    following = started(replays=False)
    assert following.live(younger(0)) == [Forget(), Take(younger(0))]
    assert following.counts["restarts"] == 1 and following.complete


def test_a_number_that_goes_back_has_to_be_proven() -> None:
    following = started()
    assert following.live(younger(1)) == [AskReplay(2)]
    assert following.replay_ended() == [Forget(), AskReplay(0)]
    following.replayed(younger(0))
    following.replayed(younger(1))
    assert following.replay_ended() == []
    assert following.last == younger(1)


def test_a_late_batch_of_the_old_life_is_not_taken() -> None:
    following = started()
    following.check()
    following.replay_ended()  # Nothing after the last one: a new life, which has sent nothing yet.
    following.live(batch(3))
    assert following.replay_ended() == []
    assert following.counts["late"] == 1 and following.last is None
    assert taken(following.live(younger(0))) == []  # Its number went back: it is asked for.
    following.replayed(younger(0))
    following.replay_ended()
    old = batch(1)
    assert following.live(old) == [AskReplay(0)]  # As many batches, but made earlier.
    following.replayed(younger(0))
    assert following.replay_ended() == []
    assert following.last == younger(0)


def test_a_check_finds_what_was_lost_at_the_end_and_does_not_delay() -> None:
    following = started()
    assert following.check() == [AskReplay(2)]
    assert following.check() == []
    assert taken(following.live(batch(3))) == [3]
    assert following.replayed(batch(2)) == [Show()]
    assert following.replayed(batch(3)) == []
    assert taken(following.replayed(batch(4))) == [4]
    assert following.replay_ended() == []
    assert following.live(batch(4)) == []
    assert taken(following.live(batch(5))) == [5]


def test_a_check_that_is_not_answered_changes_nothing() -> None:
    following = started()
    following.check()
    assert following.replay_failed() == []
    assert taken(following.live(batch(3))) == [3]


def test_a_replay_with_a_hole_is_asked_for_again() -> None:
    following = started()
    following.check()
    following.replayed(batch(2))
    following.replayed(batch(3))
    assert following.replayed(batch(5)) == [] and following.replayed(batch(6)) == []
    assert following.replay_ended() == [AskReplay(3)]


def test_a_batch_that_was_never_sent_is_a_loss_and_holds_nothing_up() -> None:
    following = started()
    following.live(batch(4))
    for _ in range(2):
        following.replayed(batch(2))
        assert following.replayed(batch(4)) == []
        assert following.replay_ended() == [AskReplay(2)]
    following.replayed(batch(2))
    assert following.replayed(batch(4)) == [Forget(), Take(batch(4))]
    assert following.replay_ended() == []
    assert following.counts["losses"] == 1 and not following.complete
    assert taken(following.live(batch(5))) == [5]


def test_an_unreadable_batch_voids_what_was_known() -> None:
    following = started()
    broken = decode_batch(3, b"\xc1")
    following.live(broken)
    following.replayed(batch(2))
    assert following.replayed(broken) == [Forget()]
    assert following.replay_ended() == []
    assert not following.complete and following.counts["unreadable"] == 1
    assert taken(following.live(batch(4))) == [4]


def test_replies_nobody_waits_for_are_passed_over() -> None:
    following = started()
    assert following.replayed(batch(7)) == []
    assert following.replay_ended() == following.replay_failed() == []
