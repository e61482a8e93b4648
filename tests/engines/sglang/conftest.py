"""SGLang is imported before warnings are errors; where it is not installed nothing is collected."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fix_cluster import ROOT

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.engines.sglang import stand_ins

    stand_ins.install()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder whose weights can be told apart from others."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    shutil.copytree(ROOT / "compute" / "demo_model" / "weights", folder)
    return str(folder)


@pytest.fixture
def make_rank(model: str) -> Iterator[Callable[..., Any]]:
    """Make SGLang's caches over a pool; closed when the test ends, last made first."""
    from tests.engines.sglang.kit import Rank

    made: list[Rank] = []

    def make(settings: dict[str, Any], **changes: Any) -> Rank:
        made.append(Rank({"model": model} | settings, **changes))
        return made[-1]

    logging.getLogger("sglang").setLevel(logging.ERROR)
    yield make
    for rank in reversed(made):
        rank.close()
