from __future__ import annotations

import json

import pytest

from tierkv.dbfront.jobs.keepers import due_indexes
from tierkv.kvcore.errors import SqlError, UserError
from tierkv.sql.jobs.kv_index_command import (
    MANUAL,
    ON_CHANGE,
    PIN_RENEW_S,
    IndexedText,
    KvIndexCommand,
    index_used_by,
    kv_index_command,
)
from tierkv.sql.plan.plan import plan_statement
from tierkv.sql.text.lexer import tokenize


def read(text: str) -> KvIndexCommand:
    command = kv_index_command(tokenize(text), text)
    assert command is not None
    return command


def test_create_is_read_with_all_its_parts() -> None:
    text = (
        "CREATE KV INDEX IF NOT EXISTS i ON app.\"Notes\" (title || E'\\n' || lower(body)) "
        "USING MODEL m WITH (kind = chunk, pin = '1 hour', system_prompt = 'Be brief', "
        "refresh = 'on change', "
        "batch = 9, priority = batch, background = off)"
    )
    command = read(text)
    assert (command.verb, command.name, command.tolerant) == ("CREATE", "i", True)
    assert (command.table, command.table_name) == ('app."Notes"', "notes")
    assert command.expression == "title || E'\\n' || lower(body)"
    assert text[command.offset :].startswith("title")
    assert command.functions == ("lower",)
    options = command.options
    assert (options.kind, options.model, options.pin_s) == ("chunk", "m", 3600.0)
    assert (options.system_prompt, options.refresh_s) == ("Be brief", ON_CHANGE)
    assert (options.batch, options.priority, options.background) == (9, 1, False)


def test_short_forms() -> None:
    assert read("CREATE KV INDEX i ON t (b) WITH (ttl = '30 days')").options.ttl_s == 30 * 86_400.0
    assert read("CREATE KV INDEX i ON t (b) WITH (ttl = off, tier = pool)").options.ttl_s == 0.0
    assert read("CREATE KV INDEX i ON t (b) WITH (tier = 'memory')").options.in_memory
    assert read("create kv index i on t (b)").options.refresh_s is None
    assert read("CREATE KV INDEX i ON t (f(a, 1) || b[1, 2])").expression == "f(a, 1) || b[1, 2]"
    assert read("CREATE KV INDEX i ON t (b) WITH (refresh = manual)").options.refresh_s == MANUAL
    assert read("CREATE KV INDEX i ON t (b) WITH (refresh = '5 min')").options.refresh_s == 300.0
    assert read("REFRESH KV INDEX i") == KvIndexCommand("REFRESH", "i")
    assert read("DROP KV INDEX IF EXISTS i") == KvIndexCommand("DROP", "i", tolerant=True)
    for other in ("CREATE INDEX i ON t (b)", "DROP KV NAMESPACE n", "ALTER KV INDEX i"):
        assert kv_index_command(tokenize(other), other) is None


@pytest.mark.parametrize(
    ("text", "sqlstate"),
    [
        ("CREATE KV INDEX i ON t (title, body)", "42601"),
        ("CREATE KV INDEX i ON t b", "42601"),
        ("CREATE KV INDEX i ON (b)", "42601"),
        ("CREATE KV INDEX i ON t (b) USING m", "42601"),
        ("CREATE KV INDEX i ON t (b) WITH (kinds = chunk)", "42601"),
        ("CREATE KV INDEX i ON t (b) WITH (capacity = 9)", "42601"),
        ("CREATE KV INDEX i ON t (b) WITH (tier = gpu)", "22023"),
        ("CREATE KV INDEX i ON t (b) WITH (tier = disk)", "0A000"),
        ("CREATE KV INDEX i ON t (b) WITH (pin = '1 h', tier = memory)", "22023"),
        ("CREATE KV INDEX i ON t (b) WITH (ttl = '0 s')", "22023"),
        ("CREATE KV INDEX i ON t (b) WITH (kind = chunks)", "22023"),
        ("CREATE KV INDEX i ON t (b) WITH (pin = '0.1 s')", "22023"),
        ("CREATE KV INDEX i ON t (b) WITH (batch = 0)", "22023"),
        ("CREATE KV INDEX i ON t (b) WITH (pin = '999999999 weeks')", "22023"),
        ("CREATE KV INDEX i ON t (b || localtime)", "42P17"),
        ("CREATE KV INDEX i ON t (b || Now())", "42P17"),
        ("CREATE KV INDEX i ON t (ai_embed(b))", "0A000"),
        ("REFRESH KV INDEX i now", "42601"),
    ],
)
def test_what_is_malformed_is_refused_with_its_place(text: str, sqlstate: str) -> None:
    with pytest.raises(UserError) as refused:
        read(text)
    assert refused.value.sqlstate == sqlstate and refused.value.position > 0


NOTES = IndexedText("", "notes_kv", "notes", "title || ' ' || body", "prefix")
CHUNKS = IndexedText("", "chunks", "notes", "body", "chunk")


@pytest.mark.parametrize(
    ("sql", "used"),
    [
        ("SELECT ai_generate(title || ' ' || body || '?') FROM notes", "notes_kv"),
        ("SELECT ai_generate(n.TITLE||' '||n.body) FROM app.notes n", "notes_kv"),
        ("SELECT ai_filter('Late?', title || ' ' || body) FROM notes", "notes_kv"),
        ("SELECT ai_classify(title || ' ' || body, ['a', 'b']) FROM notes", "notes_kv"),
        ("SELECT ai_generate('Q: ' || title || ' ' || body) FROM notes", None),
        ("SELECT ai_generate(title || ' ' || body) FROM others", None),
        ("SELECT ai_generate(title || ' ' || body[1]) FROM notes", None),
        ("SELECT ai_generate('Q', documents => ['x', notes.body]) FROM notes", "chunks"),
        ("SELECT ai_generate('Q', documents => [body || 'x']) FROM notes", "chunks"),
        ("SELECT ai_generate('Q', documents => ['x']) FROM notes", None),
    ],
)
def test_explain_finds_the_index_of_a_call(sql: str, used: str | None) -> None:
    (site, *_) = plan_statement(sql).sites
    found = index_used_by(sql, dict(site.arguments), [NOTES, CHUNKS])
    assert (found.name if found is not None else None) == used


def test_due_indexes() -> None:
    def row(
        name: str,
        period_s: float,
        state: str = "fresh",
        refreshed_s: float = 100.0,
        oldest: tuple[float | None, float | None] = (None, None),
        **more: object,
    ) -> tuple[object, ...]:
        options = json.dumps({"refresh_s": period_s, "background": True, "made_by": "ann", **more})
        table = f"{name}_table"
        return ("", name, "main", options, refreshed_s, table, state, "body", *oldest)

    rows = [
        row("changing", ON_CHANGE), row("written", ON_CHANGE), row("hourly", 3600.0),
        row("manual", MANUAL), row("new", MANUAL, "building", 0.0),
    ]  # fmt: skip
    due = {d.name: d.due_s for d in due_indexes(rows, {"written_table", "manual_table"}, {}, set())}
    assert due == {"written": 0.0, "hourly": 3700.0, "new": 0.0}
    failed = {("ann", "written")}
    tried = {("ann", "written"): 200.0}
    assert [d.due_s for d in due_indexes(rows[1:2], {"written_table"}, tried, failed)] == [230.0]

    aging = [
        row("old", ON_CHANGE, oldest=(50.0, 50.0), ttl_s=100.0),
        row("all_the_time", ON_CHANGE, oldest=(1.0, 1.0), ttl_s=99.5),
        row("by_hand", MANUAL, oldest=(50.0, 50.0), ttl_s=100.0),
        row("short", 3600.0, oldest=(90.0, 90.0), ttl_s=60.0),
        row("pinned", ON_CHANGE, oldest=(50.0, 60.0), tier="memory"),
        row("empty", ON_CHANGE, ttl_s=10.0, tier="memory"),
    ]
    due = {d.name: d.due_s for d in due_indexes(aging, (), {}, set())}
    assert due == {"old": 150.0, "all_the_time": 101.0, "short": 150.0, "pinned": 60 + PIN_RENEW_S}


def test_a_missing_option_is_suggested() -> None:
    with pytest.raises(SqlError) as refused:
        read("CREATE KV INDEX i ON t (b) WITH (batsh = 3)")
    assert refused.value.hint == "Did you mean batch?"
