"""Releases of engines: tested ones say nothing, others are named with those that are."""

from __future__ import annotations

import pytest

from tierkv.integrations.versions import untested


@pytest.mark.parametrize(
    ("engine", "version"),
    [("vllm", "0.32.0"), ("vllm", "0.32.1+cpu"), ("vllm", "0.32"), ("sglang", "0.5.23.post1")],
)
def test_tested_releases_are_not_spoken_of(engine: str, version: str) -> None:
    assert untested(engine, version) == ""


@pytest.mark.parametrize(
    ("engine", "version", "known"),
    [
        ("vllm", "0.3.2", "0.32"),
        ("vllm", "0.320.0", "0.32"),
        ("vllm", "0.33.0", "0.32"),
        ("vllm", "", "0.32"),
        ("sglang", "0.5.2", "0.5.23"),
        ("other", "1", "none"),
    ],
)
def test_others_are_named_with_those_that_are(engine: str, version: str, known: str) -> None:
    said = f"{engine} {version} was not tested with TierKV; tested: {known}"
    assert untested(engine, version) == said
