"""The mapping from DuckDB types to PostgreSQL types: OIDs, sizes, type modifiers and functions.

The handlers call ``pg_type`` for the type of a result column and ``by_oid`` for the type of a
declared parameter; text_format.py, binary_format.py and parameters.py convert values to bytes and
back. Types without a PostgreSQL counterpart travel as JSON (STRUCT, MAP, UNION, nested lists) or as
text.

Drivers recognise a type by ``pg_type.typreceive`` and its sibling columns of type regproc: the OIDs
of the type's input and output functions. The values are numbers in comparisons and joins with
pg_proc, and names on display. The functions themselves are never called.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final


@dataclass(frozen=True, slots=True)
class PgType:
    """A PostgreSQL type as clients see it.

    Attributes:
        name: PostgreSQL's short name; the formats are chosen by name.
        oid: the fixed OID that clients know.
        size: bytes of the binary form; -1 for a variable size.
        duckdb: the DuckDB type to which a parameter of this type is cast; empty for no cast.
        typmod: precision and scale of numeric, else -1.
        element: the element type of an array.
    """

    name: str
    oid: int
    size: int
    duckdb: str = ""
    typmod: int = -1
    element: PgType | None = None


BOOL: Final = PgType("bool", 16, 1, "BOOLEAN")
BYTEA: Final = PgType("bytea", 17, -1, "BLOB")
INT8: Final = PgType("int8", 20, 8, "BIGINT")
# DuckDB gives an integer literal the type of the other operand, so a SMALLINT parameter would make
# ``$1 * 1000`` overflow where PostgreSQL's int2 * int4 does not: int2 parameters become INTEGER.
INT2: Final = PgType("int2", 21, 2, "INTEGER")
OID: Final = PgType("oid", 26, 4, "BIGINT")
REGPROC: Final = PgType("regproc", 24, 4, "BIGINT")
INT4: Final = PgType("int4", 23, 4, "INTEGER")
TEXT: Final = PgType("text", 25, -1)
JSON: Final = PgType("json", 114, -1, "JSON")
FLOAT4: Final = PgType("float4", 700, 4, "FLOAT")
FLOAT8: Final = PgType("float8", 701, 8, "DOUBLE")
DATE: Final = PgType("date", 1082, 4, "DATE")
TIME: Final = PgType("time", 1083, 8, "TIME")
TIMESTAMP: Final = PgType("timestamp", 1114, 8, "TIMESTAMP")
TIMESTAMPTZ: Final = PgType("timestamptz", 1184, 8, "TIMESTAMPTZ")
INTERVAL: Final = PgType("interval", 1186, 16, "INTERVAL")
TIMETZ: Final = PgType("timetz", 1266, 12, "TIMETZ")
NUMERIC: Final = PgType("numeric", 1700, -1)
UUID: Final = PgType("uuid", 2950, 16, "UUID")

# Lists of the catalog, which have their own text form: numbers separated by spaces.
INT2VECTOR: Final = PgType("int2vector", 22, -1, element=INT2)
OIDVECTOR: Final = PgType("oidvector", 30, -1, element=OID)

_ARRAYS: Final = (
    (BOOL, 1000),
    (BYTEA, 1001),
    (INT8, 1016),
    (INT2, 1005),
    (INT4, 1007),
    (TEXT, 1009),
    (OID, 1028),
    (REGPROC, 1008),
    (JSON, 199),
    (FLOAT4, 1021),
    (FLOAT8, 1022),
    (DATE, 1182),
    (TIME, 1183),
    (TIMESTAMP, 1115),
    (TIMESTAMPTZ, 1185),
    (INTERVAL, 1187),
    (TIMETZ, 1270),
    (NUMERIC, 1231),
    (UUID, 2951),
)


def _array_of(element: PgType, oid: int) -> PgType:
    cast = "" if element is NUMERIC else f"{element.duckdb or 'VARCHAR'}[]"
    return PgType(f"_{element.name}", oid, -1, cast, -1, element)


_ARRAY_BY_ELEMENT: Final = {element.name: _array_of(element, oid) for element, oid in _ARRAYS}

_BY_OID: Final = {
    **{element.oid: element for element, _ in _ARRAYS},
    **{array.oid: array for array in _ARRAY_BY_ELEMENT.values()},
    # Parameters only: types whose values are treated as a type above.
    18: TEXT,
    19: TEXT,
    705: TEXT,
    1042: TEXT,
    1043: TEXT,
    3802: PgType("jsonb", 3802, -1, "JSON"),
    3807: PgType("_jsonb", 3807, -1, "JSON[]", -1, PgType("jsonb", 3802, -1, "JSON")),
    1014: _ARRAY_BY_ELEMENT["text"],
    1015: _ARRAY_BY_ELEMENT["text"],
}

WIRE_TYPES: Final = (*(kind for kind, _ in _ARRAYS), *_ARRAY_BY_ELEMENT.values())
"""All types that a result column can have."""

DUCKDB_TYPES: Final = {
    "BOOLEAN": BOOL,
    "TINYINT": INT2,
    "SMALLINT": INT2,
    "INTEGER": INT4,
    "BIGINT": INT8,
    "UTINYINT": INT2,
    "USMALLINT": INT4,
    "UINTEGER": INT8,
    "UBIGINT": NUMERIC,
    "HUGEINT": NUMERIC,
    "UHUGEINT": NUMERIC,
    "BIGNUM": NUMERIC,
    "DECIMAL": NUMERIC,
    "FLOAT": FLOAT4,
    "DOUBLE": FLOAT8,
    "BLOB": BYTEA,
    "OID": OID,
    "REGPROC": REGPROC,
    "DATE": DATE,
    "TIME": TIME,
    "TIME_NS": TIME,
    "TIME WITH TIME ZONE": TIMETZ,
    "TIMESTAMP": TIMESTAMP,
    "TIMESTAMP_S": TIMESTAMP,
    "TIMESTAMP_MS": TIMESTAMP,
    "TIMESTAMP_NS": TIMESTAMP,
    "TIMESTAMP WITH TIME ZONE": TIMESTAMPTZ,
    "TIMESTAMPTZ": TIMESTAMPTZ,
    "TIMETZ": TIMETZ,
    "INTERVAL": INTERVAL,
    "UUID": UUID,
    "JSON": JSON,
    "INT2VECTOR": INT2VECTOR,
    "OIDVECTOR": OIDVECTOR,
}

_LIST = re.compile(r"(.*[^\]])\[\d*\]", re.DOTALL)
_COMPOSITE = re.compile(
    r"\s*(?:STRUCT|TUPLE|MAP|UNION)\(|.*\]\s*\[\d*\]\s*\Z", re.DOTALL | re.IGNORECASE
)
_DECIMAL = re.compile(r"(?:DECIMAL|NUMERIC)\((\d+),\s*(\d+)\)")


@lru_cache(maxsize=4096)
def pg_type(duckdb_name: str) -> PgType:
    """Return the PostgreSQL type for a DuckDB type name, for example ``DECIMAL(18,3)``.

    Composite types, and lists of lists or of composite types, become JSON; unknown types become
    text.
    """
    name = duckdb_name.strip()
    if is_composite(name):
        return JSON
    if match := _DECIMAL.fullmatch(name.upper()):
        precision, scale = int(match[1]), int(match[2])
        return PgType("numeric", NUMERIC.oid, -1, "", ((precision << 16) | scale) + 4)
    if match := _LIST.fullmatch(name):
        element = pg_type(match[1])
        return _ARRAY_BY_ELEMENT.get(element.name, TEXT)
    return DUCKDB_TYPES.get(name.upper(), TEXT)


_BY_NAME: Final = {
    **{kind.name: kind for kind in WIRE_TYPES},
    "jsonb": _BY_OID[3802],
    "_jsonb": _BY_OID[3807],
    "varchar": PgType("text", 1043, -1),
    "bpchar": PgType("text", 1042, -1),
    "_varchar": PgType("_text", 1015, -1, "VARCHAR[]", -1, TEXT),
}


def by_name(name: str) -> PgType | None:
    """Return the parameter type with PostgreSQL's short name, or None if the name is unknown."""
    return _BY_NAME.get(name)


def is_composite(duckdb_name: str) -> bool:
    """Return True if values of a DuckDB type are sent as JSON."""
    return _COMPOSITE.match(duckdb_name) is not None


def by_oid(oid: int) -> PgType | None:
    """Return the type that a client declared for a parameter, or None if the OID is unknown."""
    return _BY_OID.get(oid)


@dataclass(frozen=True, slots=True)
class TypeFunctions:
    """OIDs of a type's functions; ``stem`` is the common beginning of the function names."""

    stem: str
    input: int
    output: int
    receive: int
    send: int

    def named(self) -> dict[str, int]:
        """Return the OIDs of the four functions by name."""
        kinds = ("in", "out", "recv", "send")
        oids = (self.input, self.output, self.receive, self.send)
        return {f"{self.stem}{kind}": oid for kind, oid in zip(kinds, oids, strict=True)}


ARRAY_FUNCTIONS: Final = TypeFunctions("array_", 750, 751, 2400, 2401)
ENUM_FUNCTIONS: Final = TypeFunctions("enum_", 3506, 3507, 3532, 3533)
FUNCTIONS_BY_TYPE: Final = {
    "bool": TypeFunctions("bool", 1242, 1243, 2436, 2437),
    "bytea": TypeFunctions("bytea", 1244, 31, 2412, 2413),
    "int8": TypeFunctions("int8", 460, 461, 2408, 2409),
    "int2": TypeFunctions("int2", 38, 39, 2404, 2405),
    "int4": TypeFunctions("int4", 42, 43, 2406, 2407),
    "text": TypeFunctions("text", 46, 47, 2414, 2415),
    "oid": TypeFunctions("oid", 1798, 1799, 2418, 2419),
    "regproc": TypeFunctions("regproc", 44, 45, 2444, 2445),
    "json": TypeFunctions("json_", 321, 322, 323, 324),
    "jsonb": TypeFunctions("jsonb_", 3806, 3804, 3805, 3803),
    "float4": TypeFunctions("float4", 200, 201, 2424, 2425),
    "float8": TypeFunctions("float8", 214, 215, 2426, 2427),
    "date": TypeFunctions("date_", 1084, 1085, 2468, 2469),
    "time": TypeFunctions("time_", 1143, 1144, 2470, 2471),
    "timestamp": TypeFunctions("timestamp_", 1312, 1313, 2474, 2475),
    "timestamptz": TypeFunctions("timestamptz_", 1150, 1151, 2476, 2477),
    "interval": TypeFunctions("interval_", 1160, 1161, 2478, 2479),
    "timetz": TypeFunctions("timetz_", 1350, 1351, 2472, 2473),
    "numeric": TypeFunctions("numeric_", 1701, 1702, 2460, 2461),
    "uuid": TypeFunctions("uuid_", 2952, 2953, 2961, 2962),
    "varchar": TypeFunctions("varchar", 1046, 1047, 2432, 2433),
    "bpchar": TypeFunctions("bpchar", 1044, 1045, 2430, 2431),
    "name": TypeFunctions("name", 34, 35, 2422, 2423),
    "inet": TypeFunctions("inet_", 910, 911, 2496, 2497),
    "trigger": TypeFunctions("trigger_", 2300, 2301, 0, 0),
    "internal": TypeFunctions("internal_", 2304, 2305, 0, 0),
    "void": TypeFunctions("void_", 2298, 2299, 3120, 3121),
    "record": TypeFunctions("record_", 2290, 2291, 2402, 2403),
    "unknown": TypeFunctions("unknown", 109, 110, 2416, 2417),
    "int2vector": TypeFunctions("int2vector", 40, 41, 2410, 2411),
    "oidvector": TypeFunctions("oidvector", 54, 55, 2420, 2421),
}
FUNCTION_OIDS: Final = {
    name: oid
    for one in (*FUNCTIONS_BY_TYPE.values(), ARRAY_FUNCTIONS, ENUM_FUNCTIONS)
    for name, oid in one.named().items()
    if oid
}
_FUNCTION_NAMES: Final = {oid: name for name, oid in FUNCTION_OIDS.items()}
FUNCTION_COLUMNS: Final = frozenset(
    {"typinput", "typoutput", "typreceive", "typsend"}
    | {"typmodin", "typmodout", "typanalyze", "typsubscript"}
)
"""Columns of pg_type that hold an OID of such a function, or 0."""


def function_name(oid: int) -> str:
    """Return the text that regproc shows for an OID."""
    return _FUNCTION_NAMES.get(oid, str(oid) if oid else "-")
