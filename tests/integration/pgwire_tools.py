"""Queries in the manner of the tools that send them, and what the answer must be.

Not the tools' own text: each asks the same catalogues, columns and functions in the same way, so
that what a tool needs is here. ``{docs}`` and ``{main}`` stand for OIDs.
"""

from __future__ import annotations

from dataclasses import dataclass

SETUP = (
    "CREATE TABLE docs (id INTEGER PRIMARY KEY, body VARCHAR NOT NULL DEFAULT 'x', "
    "price DECIMAL(10,2) CHECK (price > 0), tags VARCHAR[], made TIMESTAMPTZ, "
    "UNIQUE (body, price))",
    "CREATE INDEX docs_price ON docs (price, body)",
    "CREATE TABLE lines (a INTEGER, b INTEGER, doc INTEGER REFERENCES docs (id), "
    "PRIMARY KEY (a, b))",
    "CREATE VIEW cheap AS SELECT id, price FROM docs WHERE price < 5",
    "CREATE SCHEMA sales",
    "CREATE TABLE sales.totals (id INTEGER PRIMARY KEY)",
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE SEQUENCE numbers",
    "COMMENT ON TABLE docs IS 'papers'",
    "COMMENT ON COLUMN docs.body IS 'the text'",
)


@dataclass(frozen=True)
class Asked:
    """One query; ``rows`` is all of the answer."""

    tool: str
    what: str
    sql: str
    rows: list[tuple]


_ON_PATH = """quote_ident({0}) IN (
  SELECT CASE WHEN trim(p[n]) = '"$user"' THEN user ELSE trim(p[n]) END
  FROM generate_series(array_lower(string_to_array(current_setting('search_path'), ','), 1),
                       array_upper(string_to_array(current_setting('search_path'), ','), 1)) AS n,
       string_to_array(current_setting('search_path'), ',') p)"""


def _grafana_columns(table: str) -> str:
    ident = f"parse_ident('{table}')"
    return f"""SELECT quote_ident(column_name) AS "column", data_type AS "type"
        FROM information_schema.columns WHERE CASE WHEN array_length({ident}, 1) = 2
        THEN quote_ident(table_schema) = ({ident})[1] AND quote_ident(table_name) = ({ident})[2]
        ELSE quote_ident(table_name) = '{table}' AND {_ON_PATH.format("table_schema")} END
        ORDER BY ordinal_position"""


ASKED = [
    Asked(
        "Grafana",
        "version",
        "SELECT current_setting('server_version_num')::int/100 AS v",
        [(1600,)],
    ),
    Asked("Grafana", "timescale", "SELECT extversion FROM pg_extension WHERE extname = 'x'", []),
    Asked(
        "Grafana",
        "schemas",
        """SELECT schema_name FROM information_schema.schemata
           WHERE schema_name NOT IN ('information_schema', 'pg_catalog') ORDER BY schema_name""",
        [("public",), ("sales",), ("tierkv",)],
    ),
    Asked(
        "Grafana",
        "tables",
        f"""SELECT CASE WHEN {_ON_PATH.format("table_schema")} THEN quote_ident(table_name)
            ELSE quote_ident(table_schema) || '.' || quote_ident(table_name) END AS "table"
            FROM information_schema.tables
            WHERE quote_ident(table_schema) NOT IN ('information_schema', 'pg_catalog', 'tierkv')
            ORDER BY CASE WHEN {_ON_PATH.format("table_schema")} THEN 0 ELSE 1 END, 1""",
        [("cheap",), ("docs",), ("lines",), ("sales.totals",)],
    ),
    Asked(
        "Grafana",
        "columns",
        _grafana_columns("docs"),
        [
            ("id", "integer"),
            ("body", "text"),
            ("price", "numeric"),
            ("tags", "ARRAY"),
            ("made", "timestamp with time zone"),
        ],
    ),
    Asked("Grafana", "columns of a schema", _grafana_columns("sales.totals"), [("id", "integer")]),
    Asked(
        "Metabase",
        "enums",
        """SELECT nspname, typname FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
           WHERE t.oid IN (SELECT DISTINCT enumtypid FROM pg_enum)""",
        [("public", "mood")],
    ),
    Asked(
        "Metabase",
        "tables",
        """SELECT "n"."nspname", "c"."relname", "c"."relkind", "d"."description", "s"."n_live_tup"
           FROM "pg_catalog"."pg_class" AS "c"
           INNER JOIN "pg_catalog"."pg_namespace" AS "n" ON "c"."relnamespace" = "n"."oid"
           LEFT JOIN "pg_catalog"."pg_description" AS "d" ON "c"."oid" = "d"."objoid"
             AND "d"."objsubid" = 0 AND "d"."classoid" = 'pg_class'::regclass
           LEFT JOIN "pg_stat_user_tables" AS "s" ON "n"."nspname" = "s"."schemaname"
             AND "c"."relname" = "s"."relname"
           WHERE "n"."nspname" !~ '^pg_' AND "n"."nspname" !~ '^tierkv'
             AND c.relkind IN ('r', 'p', 'v', 'f', 'm') ORDER BY 1, 2""",
        [
            ("public", "cheap", "v", None, None),
            ("public", "docs", "r", "papers", 0),
            ("public", "lines", "r", None, 0),
            ("sales", "totals", "r", None, 0),
        ],
    ),
    Asked(
        "Metabase",
        "fields",
        """SELECT "c"."column_name", CASE WHEN "c"."udt_schema" IN ('public', 'pg_catalog')
             THEN FORMAT('%s', "c"."udt_name")
             ELSE FORMAT('"%s"."%s"', "c"."udt_schema", "c"."udt_name") END,
             "c"."ordinal_position" - 1, "pk"."column_name" IS NOT NULL,
             COL_DESCRIPTION(CAST(CAST(FORMAT('%I.%I', CAST("c"."table_schema" AS TEXT),
               CAST("c"."table_name" AS TEXT)) AS REGCLASS) AS OID), "c"."ordinal_position")
           FROM "information_schema"."columns" AS "c"
           LEFT JOIN (SELECT "t"."table_schema", "t"."table_name", "k"."column_name"
             FROM "information_schema"."table_constraints" AS "t"
             INNER JOIN "information_schema"."key_column_usage" AS "k"
               ON "t"."constraint_name" = "k"."constraint_name"
               AND "t"."table_schema" = "k"."table_schema" AND "t"."table_name" = "k"."table_name"
             WHERE "t"."constraint_type" = 'PRIMARY KEY') AS "pk"
             ON "c"."table_schema" = "pk"."table_schema" AND "c"."table_name" = "pk"."table_name"
             AND "c"."column_name" = "pk"."column_name"
           WHERE c.table_schema !~ '^information_schema|catalog_history|pg_'
             AND "c"."table_name" = 'docs' ORDER BY 3""",
        [
            ("id", "int4", 0, True, None),
            ("body", "text", 1, False, "the text"),
            ("price", "numeric", 2, False, None),
            ("tags", "_text", 3, False, None),
            ("made", "timestamptz", 4, False, None),
        ],
    ),
    Asked(
        "Metabase",
        "foreign keys",
        """SELECT "ft"."relname", "fc"."attname", "pt"."relname", "pc"."attname"
           FROM "pg_constraint" AS "c" INNER JOIN "pg_class" AS "ft" ON "c"."conrelid" = "ft"."oid"
           INNER JOIN "pg_attribute" AS "fc" ON "c"."conrelid" = "fc"."attrelid"
           INNER JOIN "pg_class" AS "pt" ON "c"."confrelid" = "pt"."oid"
           INNER JOIN "pg_attribute" AS "pc" ON "c"."confrelid" = "pc"."attrelid"
           WHERE "c"."contype" = 'f'::char AND "fc"."attnum" = ANY(c.conkey)
             AND "pc"."attnum" = ANY(c.confkey)""",
        [("lines", "doc", "docs", "id")],
    ),
    Asked(
        "Metabase",
        "first columns of indexes",
        """SELECT tmp.name, TRIM(BOTH '"' FROM PG_CATALOG.PG_GET_INDEXDEF(tmp.ci, tmp.pos, FALSE))
           FROM (SELECT ct.relname AS name, ci.oid AS ci,
                   (INFORMATION_SCHEMA._PG_EXPANDARRAY(i.indkey)).n AS pos
                 FROM pg_catalog.pg_class ct JOIN pg_catalog.pg_index i ON ct.oid = i.indrelid
                 JOIN pg_catalog.pg_class ci ON ci.oid = i.indexrelid
                 WHERE PG_CATALOG.PG_GET_EXPR(i.indpred, i.indrelid) IS NULL) AS tmp
           WHERE tmp.pos = 1 ORDER BY 1, 2""",
        [("docs", "body"), ("docs", "id"), ("docs", "price"), ("lines", "a"), ("totals", "id")],
    ),
    Asked(
        "DBeaver",
        "session",
        "SELECT current_schema(), session_user, current_database()",
        [("public", "alice", "shop")],
    ),
    Asked(
        "DBeaver",
        "the database by its name",
        """SELECT d.datname, d.datallowconn, d.datistemplate
           FROM pg_catalog.pg_database d WHERE datname = 'shop'""",
        [("shop", True, False)],
    ),
    Asked(
        "DBeaver",
        "types",
        """SELECT t.typname, t.typcategory, format_type(nullif(t.typbasetype, 0), t.typtypmod),
             et.typname FROM pg_catalog.pg_type t
           LEFT OUTER JOIN pg_catalog.pg_type et ON et.oid = t.typelem
           LEFT OUTER JOIN pg_catalog.pg_class c ON c.oid = t.typrelid
           LEFT OUTER JOIN pg_catalog.pg_description d ON t.oid = d.objoid
           WHERE (c.relkind IS NULL OR c.relkind = 'c') AND t.typname IN ('int4', '_int4', 'mood')
           ORDER BY 1""",
        [("_int4", "A", None, "int4"), ("int4", "N", None, None), ("mood", "E", None, None)],
    ),
    Asked(
        "DBeaver",
        "tables of a schema",
        """SELECT c.relname, c.relkind, d.description,
             pg_catalog.pg_get_expr(c.relpartbound, c.oid), pg_catalog.pg_get_partkeydef(c.oid)
           FROM pg_catalog.pg_class c LEFT OUTER JOIN pg_catalog.pg_description d
             ON d.objoid = c.oid AND d.objsubid = 0 AND d.classoid = 'pg_class'::regclass
           WHERE c.relnamespace = {main} AND c.relkind NOT IN ('i', 'I', 'c') ORDER BY 1""",
        [
            ("cheap", "v", None, None, None),
            ("docs", "r", "papers", None, None),
            ("lines", "r", None, None, None),
            ("numbers", "S", None, None, None),
        ],
    ),
    Asked(
        "DBeaver",
        "columns of a table",
        """SELECT a.attname, a.atttypid, pg_catalog.pg_get_expr(ad.adbin, ad.adrelid, true),
             dsc.description, dep.objid
           FROM pg_catalog.pg_attribute a INNER JOIN pg_catalog.pg_class c ON a.attrelid = c.oid
           LEFT OUTER JOIN pg_catalog.pg_attrdef ad
             ON a.attrelid = ad.adrelid AND a.attnum = ad.adnum
           LEFT OUTER JOIN pg_catalog.pg_description dsc
             ON c.oid = dsc.objoid AND a.attnum = dsc.objsubid
           LEFT OUTER JOIN pg_depend dep ON dep.refobjid = a.attrelid AND dep.deptype = 'i'
             AND dep.refobjsubid = a.attnum AND dep.classid = dep.refclassid
           WHERE NOT a.attisdropped AND c.oid = {docs} ORDER BY a.attnum LIMIT 2""",
        [("id", 23, None, None, None), ("body", 25, "'x'", "the text", None)],
    ),
    Asked(
        "DBeaver",
        "constraints of a table",
        """SELECT c.conname, c.contype, c.conkey, t.relname, rt.relnamespace,
             CASE WHEN c.contype = 'c' THEN substring(pg_get_constraintdef(c.oid), 7) END
           FROM pg_catalog.pg_constraint c JOIN pg_catalog.pg_class t ON t.oid = c.conrelid
           LEFT OUTER JOIN pg_catalog.pg_class rt ON rt.oid = c.confrelid
           WHERE c.conrelid = {docs} ORDER BY c.conname""",
        [
            ("docs_body_price_key", "u", [2, 3], "docs", None, None),
            ("docs_id_pkey", "p", [1], "docs", None, None),
            ("docs_price_check", "c", [3], "docs", None, "((price > 0))"),
        ],
    ),
    Asked(
        "DBeaver",
        "indexes of a table",
        """SELECT c.relname, i.indisunique, i.indkey AS keys, c.relam, tc.relname AS tabrelname,
             pg_catalog.pg_get_expr(i.indpred, i.indrelid),
             pg_catalog.pg_get_expr(i.indexprs, i.indrelid, true),
             pg_catalog.pg_stat_get_numscans(i.indexrelid)
           FROM pg_catalog.pg_index i INNER JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
           INNER JOIN pg_catalog.pg_class tc ON tc.oid = i.indrelid
           LEFT OUTER JOIN pg_catalog.pg_description dsc ON i.indexrelid = dsc.objoid
           WHERE i.indrelid = {docs} ORDER BY tabrelname, c.relname""",
        [
            ("docs_body_price_key", True, "2 3", 403, "docs", None, None, 0),
            ("docs_id_pkey", True, "1", 403, "docs", None, None, 0),
            ("docs_price", False, "3 2", 403, "docs", None, None, 0),
        ],
    ),
    Asked(
        "DBeaver",
        "functions of a schema",
        """SELECT p.proname, p.pronargs, p.prokind, d.description,
             pg_catalog.pg_get_expr(p.proargdefaults, 0)
           FROM pg_catalog.pg_proc p LEFT OUTER JOIN pg_catalog.pg_description d ON d.objoid = p.oid
           WHERE p.pronamespace = {main} AND p.proname = 'ai_if'""",
        [("ai_if", 7, "f", "same as ai_filter()", None)],
    ),
    Asked(
        "DBeaver",
        "triggers of a table",
        """SELECT x.oid, p.pronamespace FROM pg_catalog.pg_trigger x
           LEFT OUTER JOIN pg_catalog.pg_proc p ON p.oid = x.tgfoid
           WHERE x.tgrelid = {docs} AND NOT x.tgisinternal""",
        [],
    ),
    Asked(
        "DBeaver",
        "a setting",
        "SELECT name, setting, source FROM pg_catalog.pg_settings WHERE name = 'row_security'",
        [("row_security", "on", "default")],
    ),
    Asked(
        "DBeaver",
        "sessions",
        "SELECT datname, usename, state FROM pg_catalog.pg_stat_activity sa",
        [("shop", "alice", "active")],
    ),
    Asked(
        "DBeaver",
        "text of a view",
        "SELECT pg_catalog.pg_get_viewdef('cheap'::regclass, true)",
        [(" SELECT id, price FROM docs WHERE (price < 5);",)],
    ),
    Asked(
        "Django",
        "keys of a table",
        """SELECT c.conname, array(SELECT attname
             FROM unnest(c.conkey) WITH ORDINALITY cols(colid, n)
             JOIN pg_attribute AS ca ON cols.colid = ca.attnum WHERE ca.attrelid = c.conrelid
             ORDER BY cols.n), c.contype
           FROM pg_constraint AS c JOIN pg_class AS cl ON c.conrelid = cl.oid
           WHERE cl.relname = 'lines' AND pg_catalog.pg_table_is_visible(cl.oid) ORDER BY 1""",
        [("lines_a_b_pkey", ["a", "b"], "p"), ("lines_doc_id_fkey", ["doc"], "f")],
    ),
    Asked(
        "Rails",
        "columns of a table",
        """SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull,
             col_description(a.attrelid, a.attnum) FROM pg_attribute a
           LEFT JOIN pg_type t ON a.atttypid = t.oid
           LEFT JOIN pg_collation c ON a.attcollation = c.oid AND a.attcollation <> t.typcollation
           WHERE a.attrelid = '"docs"'::regclass AND a.attnum > 0 ORDER BY a.attnum LIMIT 3""",
        [
            ("id", "integer", True, None),
            ("body", "text", True, "the text"),
            ("price", "numeric(10,2)", False, None),
        ],
    ),
    Asked(
        "TypeORM",
        "whether a table exists",
        """SELECT EXISTS (SELECT FROM information_schema.tables WHERE table_schema LIKE 'main'
             AND table_type LIKE 'BASE TABLE' AND table_name = 'docs')""",
        [(True,)],
    ),
    Asked(
        "ADBC",
        "types",
        """SELECT oid, typname, typreceive, typbasetype, typrelid, typarray
           FROM pg_catalog.pg_type WHERE (typreceive != 0 OR typsend != 0) AND typtype != 'r'
           AND typreceive::TEXT != 'array_recv' AND typname IN ('int4', 'varchar', '_int4')
           ORDER BY 1""",
        [(23, "int4", "int4recv", 0, 0, 1007), (1043, "varchar", "varcharrecv", 0, 0, 1015)],
    ),
    Asked(
        "Npgsql",
        "types",
        """SELECT ns.nspname, t.oid, t.typname, t.typtype, t.elemtypoid
           FROM (SELECT typ.oid, typ.typnamespace, typ.typname, typ.typtype, typ.relkind,
                   elemtyp.oid AS elemtypoid,
                   CASE WHEN elemproc.proname = 'array_recv' THEN 'a' ELSE elemtyp.typtype END
                   AS elemtyptype
                 FROM (SELECT typ.oid, typnamespace, typname, typrelid, relkind,
                         CASE WHEN proc.proname = 'array_recv' THEN 'a' ELSE typ.typtype END
                         AS typtype,
                         CASE WHEN proc.proname = 'array_recv' THEN typ.typelem
                              WHEN typ.typtype = 'r' THEN rngsubtype
                              WHEN typ.typtype = 'd' THEN typ.typbasetype END AS elemtypoid
                       FROM pg_type AS typ LEFT JOIN pg_class AS cls ON (cls.oid = typ.typrelid)
                       LEFT JOIN pg_proc AS proc ON proc.oid = typ.typreceive
                       LEFT JOIN pg_range ON (pg_range.rngtypid = typ.oid)) AS typ
                 LEFT JOIN pg_type AS elemtyp ON elemtyp.oid = elemtypoid
                 LEFT JOIN pg_proc AS elemproc ON elemproc.oid = elemtyp.typreceive) AS t
           JOIN pg_namespace AS ns ON (ns.oid = typnamespace)
           WHERE typtype IN ('b', 'r', 'm', 'e', 'd') OR (typtype = 'a' AND elemtyptype = 'b')
           ORDER BY CASE t.typname WHEN 'bool' THEN 0 WHEN '_bool' THEN 1 ELSE 2 END LIMIT 2""",
        [("pg_catalog", 16, "bool", "b", None), ("pg_catalog", 1000, "_bool", "a", 16)],
    ),
    Asked(
        "Ruby pg",
        "type maps",
        """SELECT t.oid, t.typname, t.typelem, t.typdelim, ti.proname AS typinput FROM pg_type AS t
           JOIN pg_proc AS ti ON ti.oid = t.typinput WHERE t.oid IN (16, 1000, 869) ORDER BY 1""",
        [
            (16, "bool", 0, ",", "boolin"),
            (869, "inet", 0, ",", "inet_in"),
            (1000, "_bool", 16, ",", "array_in"),
        ],
    ),
    Asked("TypeORM", "schema", "SELECT * FROM current_schema()", [("public",)]),
    Asked("TypeORM", "database", "SELECT * FROM current_database()", [("shop",)]),
    Asked(
        "Hasura",
        "rows as JSON",
        """SELECT coalesce(json_agg(x ORDER BY n DESC) FILTER (WHERE n > 1), '[]')::text,
                  json_object_agg(x, n)::text, json_agg(row_to_json(t)) FILTER (WHERE n > 2)::text,
                  json_agg(x) FILTER (WHERE n > 9)::text
           FROM (VALUES ('a', 1), ('b', 2), ('c', 3)) t(x, n)""",
        [('["c","b"]', '{"a":1,"b":2,"c":3}', '[{"x":"c","n":3}]', None)],
    ),
    Asked(
        "DBD::Pg",
        "statistics",
        """SELECT pg_index_column_has_property(i.indexrelid, 1, 'asc') FROM pg_index i
           JOIN pg_class c ON c.oid = i.indrelid WHERE c.relname = 'totals'""",
        [(True,)],
    ),
    Asked(
        "pgAdmin",
        "our settings",
        """SELECT setting, current_setting('tierkv.max_calls') FROM pg_settings
           WHERE name = 'tierkv.max_calls'""",
        [("1000", "1000")],
    ),
    Asked(
        "psqlODBC",
        "primary keys",
        """SELECT ta.attname, ia.attnum FROM pg_catalog.pg_attribute ta, pg_catalog.pg_attribute ia,
           pg_catalog.pg_class tc, pg_catalog.pg_index i, pg_catalog.pg_namespace n
           WHERE tc.relname = 'lines' AND n.nspname = 'public' AND tc.oid = i.indrelid
           AND n.oid = tc.relnamespace AND i.indisprimary = 't' AND ia.attrelid = i.indexrelid
           AND ta.attrelid = i.indrelid AND ta.attnum = i.indkey[ia.attnum-1] ORDER BY 2""",
        [("a", 1), ("b", 2)],
    ),
    Asked(
        "psqlODBC",
        "foreign keys",
        """SELECT c2.relname, a1.attname, i::int2 FROM ((SELECT conrelid, conkey, confrelid,
           generate_series(array_lower(conkey, 1), array_upper(conkey, 1)) AS i
           FROM pg_catalog.pg_constraint cn WHERE contype = 'f') ref
           INNER JOIN pg_catalog.pg_class c2 ON c2.oid = ref.confrelid)
           INNER JOIN pg_catalog.pg_attribute a1 ON a1.attrelid = conrelid AND a1.attnum = conkey[i]
           """,
        [("docs", "doc", 1)],
    ),
    Asked(
        "DBD::Pg",
        "what a foreign key needs",
        """SELECT c.conname, x.relname, k.conname FROM pg_constraint c
           JOIN pg_depend d ON d.classid = 'pg_catalog.pg_constraint'::regclass AND d.objid = c.oid
             AND d.deptype = 'n' AND d.refclassid = 'pg_catalog.pg_class'::regclass
           JOIN pg_class x ON x.oid = d.refobjid AND x.relkind = 'i'
           LEFT JOIN pg_depend e ON e.classid = 'pg_catalog.pg_class'::regclass
             AND e.objid = x.oid AND e.deptype = 'i'
           LEFT JOIN pg_constraint k ON k.oid = e.refobjid""",
        [("lines_doc_id_fkey", "docs_id_pkey", "docs_id_pkey")],
    ),
    Asked(
        "pgcli",
        "functions",
        """SELECT p.proname, COALESCE(proallargtypes::regtype[], proargtypes::regtype[])::text[],
           p.prorettype::regtype::text FROM pg_catalog.pg_proc p
           WHERE p.prorettype::regtype != 'trigger'::regtype AND p.proname = 'ai_count_tokens'""",
        [("ai_count_tokens", ["text", "text"], "integer")],
    ),
    Asked(
        "TypeORM",
        "types",
        """SELECT column_name, ('"' || "udt_schema" || '"."' || "udt_name" || '"')::"regtype"::text
           FROM "information_schema"."columns" WHERE "table_name" = 'totals'""",
        [("id", "integer")],
    ),
]
