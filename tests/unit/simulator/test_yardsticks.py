"""The yardsticks by hand: who goes, in sequences short enough to follow on paper."""

from __future__ import annotations

from tierkv.kvcore.block import Outlook
from tierkv.policies.classic import Arc, Fifo, Lfu, Lru, Ttl
from tierkv.policies.eviction import BlockFacts, EvictionPolicy, LeafLru
from tierkv.simulator.yardsticks import Lhd, S3Fifo


class Cache:
    """Single blocks, named by letters, which are handles and keys."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.here: set[str] = set()
        self.now = 0.0

    def touch(self, names: str) -> str:
        """Use blocks one after the other, a second apart; answer who left."""
        gone = ""
        for name in names:
            self.now += 1.0
            handle, facts = ord(name), BlockFacts(name)
            if name in self.here:
                self.policy.used(handle, facts, self.now)
                continue
            if len(self.here) == self.capacity:
                if not self.policy.admits(facts, self.now):
                    continue
                victim = self.policy.victim(self.now)
                assert victim is not None
                self.policy.left(victim, self.now)
                self.here.remove(chr(victim))
                gone += chr(victim)
            self.here.add(name)
            self.policy.entered(handle, facts, self.now)
            self.policy.offer(handle)
        return gone


def test_fifo_ignores_uses() -> None:
    assert Cache(Fifo(), 3).touch("abcaade") == "ab"


def test_lru_keeps_what_was_used() -> None:
    assert Cache(Lru(), 3).touch("abcade") == "bc"


def test_lfu_lets_the_least_used_go_then_the_oldest() -> None:
    assert Cache(Lfu(), 3).touch("aabbcde") == "cd"
    assert Cache(Lfu(), 3).touch("abcda") == "ab"


def test_ttl_admits_nothing_while_all_are_within_their_time() -> None:
    cache = Cache(Ttl(ttl_s=5.0), 2)
    assert cache.touch("abcd") == ""
    assert cache.touch("a") == "" and cache.here == {"a", "b"}
    cache.now += 3.0
    assert cache.touch("e") == "b", "a was used four seconds ago"


def test_leaf_lru_takes_the_deepest_of_the_oldest_request() -> None:
    policy = LeafLru()
    for handle in range(3):
        policy.entered(handle, BlockFacts(handle, outlook=Outlook(depth=handle)), 1.0)
    for handle in range(3, 5):
        policy.entered(handle, BlockFacts(handle, outlook=Outlook(depth=handle - 3)), 1.0)
    policy.used(0, BlockFacts(0), 2.0)
    gone = []
    for handle in range(5):
        policy.offer(handle)
    while (victim := policy.victim(3.0)) is not None:
        policy.left(victim, 3.0)
        gone.append(victim)
    assert gone == [2, 1, 4, 3, 0]


def test_arc_protects_what_was_used_twice_from_a_scan() -> None:
    cache = Cache(Arc(4), 4)
    assert cache.touch("aabbcdefgh") == "cdef"
    assert cache.here == {"a", "b", "g", "h"}


def test_arc_grows_the_recent_list_when_it_evicted_too_early() -> None:
    policy = Arc(4)
    cache = Cache(policy, 4)
    cache.touch("aabbcdef")
    assert policy._target == 0.0
    assert cache.touch("d") == "e", "a ghost of the recent list: it should have been longer"
    assert policy._target == 1.0 and ord("d") in policy._often


def test_s3fifo_lets_a_scan_pass_and_remembers_ghosts() -> None:
    policy = S3Fifo(10)
    cache = Cache(policy, 10)
    cache.touch("aaabbb")
    assert cache.touch("cdefghijklmn") == "cdef"
    assert {"a", "b"} <= cache.here, "used twice and more: moved to the main queue"
    cache.touch("c")
    assert ord("c") in policy._main, "its ghost was still known"


def test_lhd_learns_which_class_is_hit() -> None:
    cache = Cache(Lhd(20, seed=1), 20)
    often, name = "ABCDEFGH", 0x4E00
    for _ in range(400):
        scan = "".join(chr(name + i) for i in range(8))
        name += 8
        cache.touch(often + scan)
    assert set(often) <= cache.here
