"""What every program of this folder prints: one JSON line per step, an answer or a SQLSTATE.

PG* variables of the environment say where the server is, as for libpq.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

HOST, PORT = os.environ["PGHOST"], int(os.environ["PGPORT"])
USER, PASSWORD, DATABASE = (os.environ[f"PG{name}"] for name in ("USER", "PASSWORD", "DATABASE"))
URL = f"postgresql://{USER}:{quote(PASSWORD)}@{HOST}:{PORT}/{DATABASE}"

TYPES_SQL = "SELECT 1::int2 a, 2 b, 3::int8 c, 1.25::numeric(10, 2) d, DATE '2024-02-29' e, {more}"
AI_SQL = "SELECT id, ai_generate('Colour of ' || body) AS a FROM notes WHERE {where} ORDER BY id"


def step(what: str, call: Callable[[], Any]) -> None:
    """Run a step and print what came of it."""
    try:
        line = {"what": what, "got": call()}
    except Exception as error:  # noqa: BLE001 - each driver has a class of its own.
        line = {"what": what, "sqlstate": _sqlstate(error)}
    print(json.dumps(line, default=str, sort_keys=True), flush=True)


def _sqlstate(error: Exception) -> str:
    state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
    found = re.search(r"\b\d[0-9A-Z]{4}\b", str(error))
    return str(state or (found and found[0]) or type(error).__name__)
