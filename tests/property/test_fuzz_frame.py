"""The fuzz target itself, for a moment: its samples are valid and nothing escapes."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from tierkv.kvcore.errors import RemoteProtocolError


@pytest.fixture(scope="module")
def target() -> ModuleType:
    path = Path(__file__).parents[1] / "fuzz" / "fuzz_frame.py"
    spec = importlib.util.spec_from_file_location("fuzz_frame", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_sample_is_a_message_and_its_damage_is_refused(target: ModuleType) -> None:
    for parse, sample in target.PARSERS:
        parse(sample)
        if len(sample) != 20:  # A header is padded, not refused, when it is short.
            with pytest.raises(RemoteProtocolError):
                parse(sample[:-1])
    assert target.run_random(0.2) >= 1000
