"""Every option of a call that REST takes stands in its manual."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierkv.kvcore.call_options import OPTIONS

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("field", [option.rest for option in OPTIONS if option.rest])
def test_field(field: str) -> None:
    fields, _, _ = PAGE.partition("## Fields")[2].partition("\n## ")
    assert f"`{field}`" in fields
