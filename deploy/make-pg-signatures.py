"""Write postgres_dialect/inference/signatures.txt from a running PostgreSQL's own catalogue.

Usage: python deploy/make-pg-signatures.py "host=127.0.0.1 user=postgres dbname=postgres" > FILE
Kept are types that the wire server can send, implicit casts between them, and the operators and
functions whose arguments are such types or polymorphic.
"""

from __future__ import annotations

import sys

import psycopg

_PLAIN = (
    *("bool", "bytea", "int2", "int4", "int8", "float4", "float8", "numeric", "oid", "uuid"),
    *("text", "varchar", "bpchar", "date", "time", "timetz", "timestamp", "timestamptz"),
    *("interval", "json", "jsonb"),
)
_PSEUDO = ("any", "anyelement", "anyarray", "anynonarray", "anycompatible", "anycompatiblearray")
_ARRAYS = tuple(f"_{name}" for name in _PLAIN)
_KNOWN = [*_PLAIN, *_ARRAYS, *_PSEUDO]
_TYPES = """
SELECT 'type', typname, typcategory::text || CASE WHEN typispreferred THEN '!' ELSE '' END
  FROM pg_type WHERE typname = ANY(%(plain)s) AND typnamespace = 'pg_catalog'::regnamespace
"""
_CASTS = """
SELECT 'cast', s.typname, t.typname FROM pg_cast
  JOIN pg_type s ON s.oid = castsource JOIN pg_type t ON t.oid = casttarget
 WHERE castcontext = 'i' AND castsource <> casttarget
   AND s.typname = ANY(%(plain)s) AND t.typname = ANY(%(plain)s)
"""
_OPERATORS = """
SELECT 'operator', oprname, coalesce(l.typname, '-'), r.typname, o.typname FROM pg_operator
  LEFT JOIN pg_type l ON l.oid = oprleft JOIN pg_type r ON r.oid = oprright
  JOIN pg_type o ON o.oid = oprresult
 WHERE oprname ~ '^([-+*/%%^=<>]|<>|<=|>=|\\|\\||~~\\*?|!~~\\*?|!?~\\*?|->>?|@>|<@|&&)$'
   AND (l.typname IS NULL OR l.typname = ANY(%(known)s)) AND r.typname = ANY(%(known)s)
"""
_FUNCTIONS = """
SELECT 'function', proname, pronargdefaults::text, (provariadic <> 0)::int::text, r.typname,
       coalesce(string_agg(a.typname, ' ' ORDER BY place), '')
  FROM (SELECT *, proargtypes::oid[] AS arguments FROM pg_proc) p
  JOIN pg_type r ON r.oid = prorettype
  LEFT JOIN LATERAL unnest(arguments) WITH ORDINALITY AS u(kind, place) ON true
  LEFT JOIN pg_type a ON a.oid = kind
 WHERE pronamespace = 'pg_catalog'::regnamespace AND proname !~ '^(pg|has|_|binary|gin|gist|brin)_'
   AND coalesce(obj_description(p.oid, 'pg_proc'), '') NOT LIKE 'implementation of %% operator'
   AND p.oid NOT IN (SELECT castfunc FROM pg_cast WHERE castfunc <> 0)
   AND p.oid NOT IN (SELECT aggtransfn FROM pg_aggregate UNION SELECT aggfinalfn FROM pg_aggregate)
   AND p.oid NOT IN (SELECT amproc FROM pg_amproc)
   AND p.oid NOT IN (SELECT oprrest FROM pg_operator UNION SELECT oprjoin FROM pg_operator)
   AND r.typname !~ '^(internal|cstring|trigger|event_trigger|[a-z]*handler)$'
 GROUP BY p.oid, proname, pronargdefaults, provariadic, r.typname, pronargs
HAVING count(kind) > 0 AND bool_and(a.typname = ANY(%(known)s))
"""


def main() -> None:
    """Print the file."""
    values = {"plain": list(_PLAIN), "known": _KNOWN}
    lines: set[str] = set()
    with psycopg.connect(sys.argv[1]) as connection:
        version = str(connection.info.server_version // 10000)
        for query in (_TYPES, _CASTS, _OPERATORS, _FUNCTIONS):
            lines |= {" ".join(row) for row in connection.execute(query, values)}
    print(f"# From PostgreSQL {version}, by deploy/make-pg-signatures.py.")
    print("# type NAME CATEGORY[!]; cast FROM TO; operator NAME LEFT RIGHT RESULT;")
    print("# function NAME DEFAULTS VARIADIC RESULT ARGUMENTS")
    print("\n".join(sorted(lines)))


if __name__ == "__main__":
    main()
