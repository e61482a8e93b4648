"""Which roles run where on Ray, with tiny clusters."""

from __future__ import annotations

import pytest

from tierkv.kvcore.errors import UserError
from tierkv.on_ray.placement import Machine, RolePlan, plan_roles, pool_name, read_scale

CPU = {"CPU": 1.0}
A, B, C = (Machine(ray_id, f"10.0.0.{n}", {"CPU": 4.0}) for n, ray_id in enumerate("abc"))


def plans(
    counts: dict[str, int],
    *machines: Machine,
    pinned: dict[str, str] | None = None,
    needs: dict[str, float] = CPU,
    free: dict[str, float] = CPU,
) -> dict[str, RolePlan]:
    made = plan_roles(counts, machines, pinned or {}, needs, free)
    return {plan.name: plan for plan in made}


def test_each_machine_has_a_pool_node_named_after_it() -> None:
    assert plans({}, B, A) == {
        "dmp-10-0-0-0": RolePlan("dmp-10-0-0-0", "dmp", "a"),
        "dmp-10-0-0-1": RolePlan("dmp-10-0-0-1", "dmp", "b"),
    }
    assert pool_name("fd00::1:2") == "dmp-fd00-1-2"


def test_meta_servers_start_first_and_fronts_last() -> None:
    roles = [plan.role for plan in plans({"front": 1, "compute": 1, "meta": 1}, A).values()]
    assert roles == ["meta", "dmp", "compute", "front"]


def test_meta_servers_and_fronts_stay_and_move_only_from_lost_machines() -> None:
    counts = {"meta": 2, "front": 2}
    first = plans(counts, A, B, C)
    assert [first[name].ray_id for name in ("meta-0", "meta-1")] == ["a", "b"]
    pinned = {"meta-0": "c", "meta-1": "b", "front-0": "b", "front-1": "a"}
    assert all(plans(counts, A, B, C, pinned=pinned)[n].ray_id == at for n, at in pinned.items())
    later = plans(counts, A, B, pinned=pinned)
    assert [later[name].ray_id for name in pinned] == ["a", "b", "b", "a"]


def test_what_finds_no_machine_says_why() -> None:
    found = plans({"front": 2, "compute": 1}, A, free={"CPU": 0.0})
    assert found["front-0"].ray_id == "a"
    assert "every machine has a front already" in found["front-1"].trouble
    assert "needs 1 CPU; nothing is free" in found["compute-0"].trouble
    assert not found["compute-0"].ray_id
    gpu = plans({"decode": 1}, A, needs={"GPU": 1.0})["decode-0"]
    assert gpu.trouble == "needs 1 GPU, which no machine has"
    assert "Ray is placing it" in plans({"compute": 1}, A)["compute-0"].trouble


def test_numbers_of_nodes() -> None:
    assert read_scale(["compute=8", "front=0"]) == {"compute": 8, "front": 0}


@pytest.mark.parametrize("words", ["dmp=1", "compute", "compute=", "compute=1001", "meta=0", "=3"])
def test_what_is_no_number_of_nodes(words: str) -> None:
    with pytest.raises(UserError):
        read_scale([words])
