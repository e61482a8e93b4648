"""The input and output functions of types: OIDs and names as PostgreSQL has them.

Drivers recognise a type by ``pg_type.typreceive`` and its sibling columns of type regproc. The
values are numbers in comparisons and joins with pg_proc, and names on display. The catalog has the
numbers, text_format.py shows the names. The functions themselves are never called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


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


ARRAY: Final = TypeFunctions("array_", 750, 751, 2400, 2401)
ENUM: Final = TypeFunctions("enum_", 3506, 3507, 3532, 3533)
BY_TYPE: Final = {
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
OIDS: Final = {
    name: oid
    for one in (*BY_TYPE.values(), ARRAY, ENUM)
    for name, oid in one.named().items()
    if oid
}
NAMES: Final = {oid: name for name, oid in OIDS.items()}
COLUMNS: Final = frozenset(
    {"typinput", "typoutput", "typreceive", "typsend"}
    | {"typmodin", "typmodout", "typanalyze", "typsubscript"}
)
"""Columns of pg_type that hold an OID of such a function, or 0."""


def function_name(oid: int) -> str:
    """Return the text that regproc shows for an OID."""
    return NAMES.get(oid, str(oid) if oid else "-")
