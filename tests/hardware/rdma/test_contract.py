"""The sentences of PoolNode over one-sided RDMA; see tests/contract/test_pool_node.py."""

from __future__ import annotations

from functools import partial

import pytest

from tests.contract.test_pool_node import *  # noqa: F403 - the suite itself
from tests.contract.test_pool_node import Connect, MakeRig
from tests.fix_rdma import RDMA, SERVED, OpenVerbs

pytestmark = RDMA


@pytest.fixture
def transport() -> str:
    return "rdma"


@pytest.fixture
def connect(open_verbs: OpenVerbs) -> Connect:
    return open_verbs


@pytest.fixture
def start(make_rig: MakeRig) -> MakeRig:
    return partial(make_rig, rdma_devices=SERVED)
