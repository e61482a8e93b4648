"""Every function, option, setting and view that SQL has stands in the docs as it is in the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tierkv.sql.calls.arguments import OPTION_NAMES
from tierkv.sql.calls.functions import AI_FUNCTIONS, PROMPT_TEMPLATE, RESULT_FIELDS
from tierkv.sql.settings import SETTINGS
from tierkv.sql.view_columns import VIEW_COLUMNS

DOCS = Path(__file__).parents[2] / "docs"
SQL, FUNCTIONS, VIEWS = (
    (DOCS / name).read_text() for name in ("sql.md", "functions.md", "views.md")
)
ROW = re.compile(r"^\| `([^`]+)`(?:, `([^`]+)`)? \| (.*) \|$", re.MULTILINE)


def rows(text: str) -> dict[str, str]:
    """Return the rest of each table row by the names in its first cell."""
    return {name: row[3] for row in ROW.finditer(text) for name in row.groups()[:2] if name}


def examples(*texts: str) -> str:
    return "\n".join(block for text in texts for block in re.findall(r"(?s)```sql\n.*?```", text))


@pytest.mark.parametrize("name", [*AI_FUNCTIONS, PROMPT_TEMPLATE])
def test_function(name: str) -> None:
    listed = {text.partition("(")[0] for text in rows(FUNCTIONS)}
    assert name in listed
    assert re.search(rf"\b{name}\(", examples(FUNCTIONS, SQL)), f"no example calls {name}"
    assert f"`{name}" in SQL[SQL.index("## Names elsewhere") :]


def test_parameters_and_fields() -> None:
    known = {parameter for function in AI_FUNCTIONS.values() for parameter in function.names}
    assert [name for name in sorted(known) if not re.search(rf"\b{name}\b", FUNCTIONS)] == []
    assert [name for name in RESULT_FIELDS if f"`{name}`" not in FUNCTIONS] == []


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_option(name: str) -> None:
    assert name in rows(SQL)


@pytest.mark.parametrize("name", SETTINGS)
def test_setting_and_its_default(name: str) -> None:
    row = rows(SQL[SQL.index("## Settings") : SQL.index("## Admin views")]).get(name)
    assert row is not None
    default = SETTINGS[name].shown(SETTINGS[name].default) or "empty"
    shown = row.partition(" | ")[0]
    assert shown == default or float(shown) == float(default)


@pytest.mark.parametrize("view", VIEW_COLUMNS)
def test_view_and_its_columns(view: str) -> None:
    assert f"`{view}`" in SQL
    row = rows(VIEWS)[view]
    if "those of `stat_kvcache`" in row:
        row += rows(VIEWS)["stat_kvcache"]
    told = set(re.findall(r"`([a-z0-9_]+)`", row)) | {"as_of"}
    # "`mean`, `p50` of `_ratio`" tells of mean_ratio and p50_ratio.
    ends = [part for part in told if part.startswith("_")]
    told |= {f"{part}{end}" for part in told for end in ends}
    assert [column for column in VIEW_COLUMNS[view] if column not in told] == []
