"""What other fronts say of their work at the nodes: where calls go, and how places are shared."""

from __future__ import annotations

from dataclasses import replace

from tests.fix_scheduler import make_info
from tests.unit.scheduler.test_state import CONFIG, Script, dispatched
from tierkv.kvcore.ids import NodeId
from tierkv.kvcore.node import NodeLoad
from tierkv.scheduler.events import NodesSeen, OthersSeen, RequestFinished, SeenNode
from tierkv.scheduler.shared_state.contract import KEPT_S, FrontWork

NARROW = replace(CONFIG, max_in_flight_per_node=4)
ONE, TWO = NodeId("c1"), NodeId("c2")


def script(*names: str) -> Script:
    return Script(*(make_info(name) for name in names), config=NARROW)


def sent(made: Script, count: int, prefix: str = "q") -> dict[str, str]:
    """Let requests arrive; return the node of each that was sent."""
    found: dict[str, str] = {}
    for number in range(count):
        for request, node, _ in dispatched(made.arrive(f"{prefix}{number}", locatable=False)):
            found[request] = node
    return found


def test_calls_go_where_other_fronts_have_less() -> None:
    made = script("c1", "c2")
    made.do(OthersSeen({ONE: FrontWork(3, 300)}))
    assert sent(made, 1) == {"q0": "c2"}
    made.do(OthersSeen({TWO: FrontWork(3, 900)}))
    assert sent(made, 1, "r") == {"r0": "c1"}


def test_a_heartbeat_does_not_undo_what_the_fronts_said_until_they_fall_silent() -> None:
    made = script("c1")
    made.do(OthersSeen({ONE: FrontWork(3, 300)}))
    record = made.state.fleet.records[ONE]
    made.see(make_info("c1"))
    assert (record.others_in_flight, record.others_waiting_tokens) == (3, 300)
    made.now += KEPT_S
    busy = NodeLoad(requests_running=1, requests_waiting=1, waiting_prefill_tokens=40)
    made.do(NodesSeen((SeenNode(make_info("c1"), busy),)))
    assert (record.others_in_flight, record.others_waiting_tokens) == (2, 40)
    assert record.other_fronts == 0


def test_each_front_gets_its_share_of_a_full_node() -> None:
    made = script("c1")
    made.do(OthersSeen({ONE: FrontWork(4, 0, fronts=1)}))
    assert set(sent(made, 4)) == {"q0", "q1"}  # Half of the four places.
    made.do(OthersSeen({ONE: FrontWork(4, 0, fronts=3)}))
    assert dispatched(made.do(RequestFinished("q0"))) == []  # type: ignore[arg-type]
    assert [r for r, *_ in dispatched(made.do(RequestFinished("q1")))] == ["q2"]  # type: ignore[arg-type]


def test_calls_that_wait_are_sent_when_other_fronts_end_theirs() -> None:
    made = script("c1")
    made.do(OthersSeen({ONE: FrontWork(3, 0, fronts=3)}))
    assert len(sent(made, 2)) == 1
    assert [r for r, *_ in dispatched(made.do(OthersSeen({})))] == ["q1"]
