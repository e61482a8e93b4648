"""Tests of an engine are collected where that engine is: `make test-engines` runs them all."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore = [name for name in ("vllm", "sglang") if find_spec(name) is None]
if len(collect_ignore) == 2:
    collect_ignore.append("conformance")
