"""PostgreSQL's session settings, as far as clients set or read them.

``PgSettings`` holds the values of a session; setting_commands.py changes the values at SET and
RESET. Settings that DuckDB has itself (TimeZone, search_path, threads...) are not kept here but
passed on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tierkv.kvcore.errors import FeatureNotSupportedError, SqlError

SERVER_VERSION: Final = "16.0 (TierKV)"
ISOLATION: Final = "repeatable read"
"""The isolation of DuckDB's snapshots, whatever level the client asked for."""

_TIME_UNITS: Final = {"us": 0.001, "ms": 1, "s": 1_000, "min": 60_000, "h": 3_600_000, "": 1}
_UTF8_NAMES: Final = frozenset({"utf8", "unicode", "sqlascii"})


def _same(value: str) -> str:
    return value


def _encoding(value: str) -> str:
    if re.sub("[^a-z0-9]", "", value.lower()) not in _UTF8_NAMES:
        raise FeatureNotSupportedError(f'client encoding "{value}" is not supported; use UTF8')
    return "UTF8"


def _fixed(name: str, *allowed: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value.lower() not in allowed:
            raise FeatureNotSupportedError(
                f'{name} "{value}" is not supported; it is always {allowed[0]}'
            )
        return allowed[0]

    return check


def _date_style(value: str) -> str:
    words = [word.strip().upper() for word in value.split(",")]
    if not set(words) <= {"ISO", "MDY", "DMY", "YMD", "US", "EUROPEAN", "DEFAULT"}:
        raise FeatureNotSupportedError(f'DateStyle "{value}" is not supported; output is ISO')
    return "ISO, MDY"


def _read_only(name: str) -> Callable[[str], str]:
    def refuse(value: str) -> str:
        raise SqlError(f'parameter "{name}" cannot be changed', sqlstate="55P02")

    return refuse


def milliseconds(text: str) -> int:
    """Convert a time setting, for example ``5s`` or ``250``, to milliseconds.

    Raises:
        SqlError: 22023, not a time.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|min|h|)\s*", text)
    if match is None:
        raise SqlError(f'invalid value for a time setting: "{text}"', sqlstate="22023")
    return round(float(match[1]) * _TIME_UNITS[match[2]])


def _time(value: str) -> str:
    return str(milliseconds(value))


@dataclass(frozen=True, slots=True)
class PgSettingSpec:
    """One setting; ``parse`` checks a new value and returns its stored form."""

    name: str
    default: str
    parse: Callable[[str], str] = _same
    reported: bool = False


_SPECS: Final = (
    PgSettingSpec("server_version", SERVER_VERSION, _read_only("server_version"), True),
    PgSettingSpec("server_version_num", "160000", _read_only("server_version_num")),
    PgSettingSpec("server_encoding", "UTF8", _read_only("server_encoding"), True),
    PgSettingSpec("client_encoding", "UTF8", _encoding, True),
    PgSettingSpec("integer_datetimes", "on", _read_only("integer_datetimes"), True),
    PgSettingSpec(
        "standard_conforming_strings",
        "on",
        _fixed("standard_conforming_strings", "on", "true", "1", "yes"),
        True,
    ),
    PgSettingSpec("DateStyle", "ISO, MDY", _date_style, True),
    PgSettingSpec("IntervalStyle", "postgres", _fixed("IntervalStyle", "postgres"), True),
    PgSettingSpec("application_name", "", _same, True),
    PgSettingSpec("is_superuser", "on", _read_only("is_superuser"), True),
    PgSettingSpec("session_authorization", "", _read_only("session_authorization"), True),
    PgSettingSpec("in_hot_standby", "off", _read_only("in_hot_standby"), True),
    PgSettingSpec("default_transaction_read_only", "off", _same, True),
    PgSettingSpec("transaction_read_only", "off"),
    PgSettingSpec("transaction_isolation", ISOLATION),
    PgSettingSpec("default_transaction_isolation", ISOLATION),
    PgSettingSpec("transaction_deferrable", "off"),
    PgSettingSpec("default_transaction_deferrable", "off"),
    PgSettingSpec("statement_timeout", "0", _time),
    PgSettingSpec("lock_timeout", "0", _time),
    PgSettingSpec("idle_in_transaction_session_timeout", "0", _time),
    PgSettingSpec("idle_session_timeout", "0", _time),
    PgSettingSpec("extra_float_digits", "1"),
    PgSettingSpec("bytea_output", "hex", _fixed("bytea_output", "hex")),
    PgSettingSpec("client_min_messages", "notice"),
    PgSettingSpec("escape_string_warning", "on"),
    PgSettingSpec("backslash_quote", "safe_encoding"),
    PgSettingSpec("password_encryption", "scram-sha-256", _read_only("password_encryption")),
    PgSettingSpec("row_security", "on"),
    PgSettingSpec("synchronous_commit", "on"),
    PgSettingSpec("check_function_bodies", "on"),
    PgSettingSpec("xmloption", "content"),
    PgSettingSpec("default_table_access_method", "heap"),
    PgSettingSpec("default_tablespace", ""),
    PgSettingSpec("max_identifier_length", "63", _read_only("max_identifier_length")),
    PgSettingSpec("max_index_keys", "32", _read_only("max_index_keys")),
    PgSettingSpec("jit", "off"),
    PgSettingSpec("work_mem", "4MB"),
    PgSettingSpec("maintenance_work_mem", "64MB"),
    PgSettingSpec("lc_collate", "C.UTF-8", _read_only("lc_collate")),
    PgSettingSpec("lc_ctype", "C.UTF-8", _read_only("lc_ctype")),
    PgSettingSpec("lc_messages", "C.UTF-8"),
    PgSettingSpec("lc_monetary", "C.UTF-8"),
    PgSettingSpec("enable_seqscan", "on"),
    PgSettingSpec("log_statement", "none"),
    PgSettingSpec("log_min_duration_statement", "-1"),
)
SPECS: Final = {spec.name.lower(): spec for spec in _SPECS}


class PgSettings:
    """The values of one session; names are case-insensitive.

    Attributes:
        time_zone: the engine's last TimeZone; reported with the other settings.
    """

    def __init__(
        self, user: str, application_name: str, defaults: Mapping[str, str] | None = None
    ) -> None:
        self.time_zone = "UTC"
        self._start = {name: SPECS[name].parse(text) for name, text in (defaults or {}).items()}
        self._start |= {"session_authorization": user, "application_name": application_name}
        self._values: dict[str, str] = {}
        self._local: dict[str, str] = {}
        self._told = dict(self.reported())

    @staticmethod
    def known(name: str) -> bool:
        """Return True if the setting is kept here."""
        return name.lower() in SPECS

    def get(self, name: str) -> str:
        """Return the current value."""
        key = name.lower()
        for layer in (self._local, self._values, self._start):
            if key in layer:
                return layer[key]
        return SPECS[key].default

    def set(self, name: str, value: str, *, local: bool = False) -> None:
        """Change a setting, until the end of the transaction if ``local``.

        Raises:
            SqlError: the value is not allowed or the setting is read-only.
        """
        key = name.lower()
        parsed = SPECS[key].parse(value)
        if key.endswith("transaction_isolation"):
            parsed = ISOLATION
        (self._local if local else self._values)[key] = parsed

    def reset(self, name: str) -> None:
        """Restore the value at login; ``all`` resets all settings."""
        for layer in (self._local, self._values):
            if name.lower() == "all":
                layer.clear()
            else:
                layer.pop(name.lower(), None)

    def end_transaction(self) -> None:
        """Forget SET LOCAL."""
        self._local.clear()

    def all(self) -> list[tuple[str, str, str]]:
        """Return the rows of SHOW ALL."""
        return [(spec.name, self.get(spec.name), "") for spec in _SPECS]

    def reported(self) -> Iterator[tuple[str, str]]:
        """Yield the settings reported to a client without a query (ParameterStatus)."""
        for spec in _SPECS:
            if spec.reported:
                yield spec.name, self.get(spec.name)
        yield "TimeZone", self.time_zone

    def take_changes(self) -> list[tuple[str, str]]:
        """Return the reported settings that changed since the last call."""
        now = dict(self.reported())
        changed = [(name, value) for name, value in now.items() if self._told[name] != value]
        self._told = now
        return changed

    @property
    def statement_timeout_s(self) -> float:
        """Return the maximum seconds of a statement; 0 means no limit."""
        return int(self.get("statement_timeout")) / 1_000

    def idle_timeout_s(self, *, in_transaction: bool) -> float:
        """Return the maximum seconds of client idleness; 0 means no limit."""
        name = "idle_in_transaction_session_timeout" if in_transaction else "idle_session_timeout"
        return int(self.get(name)) / 1_000
