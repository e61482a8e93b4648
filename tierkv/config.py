"""The only configuration loader: defaults, one TOML file, the environment, flags; later wins.

Every value keeps its source (``tierkv config show``). Unknown keys are refused with a suggestion.
The error for a bad value names the key, the source and the allowed values. Only this file reads the
process environment.
"""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from tierkv.kvcore.errors import ConfigError
from tierkv.settings import Section, Settings

ENV_PREFIX = "TIERKV_"
CONFIG_ENV = "TIERKV_CONFIG"
SECRET_KEYS = frozenset(
    {
        "cluster.token",
        "cluster.secret",
        "front.users",
        "front.api_keys",
        "front.postgres",
        "front.shared_state",
        "dmp.archive_options",
    }
)
_MAY_BE_URLS = frozenset({"meta.database", "front.answer_cache", "front.sessions"})


def _is_secret(key: str, value: object) -> bool:
    """Return whether a value must not be shown; a URL of a database has a password."""
    return bool(value) and (key in SECRET_KEYS or (key in _MAY_BE_URLS and "://" in str(value)))


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """Settings, and the source of each setting.

    Attributes:
        settings: the values.
        sources: per ``section.key``: ``default``, the file's path, ``env NAME`` or ``flag``.
    """

    settings: Settings
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ConfigEntry:
    """One line of ``tierkv config show``; secrets are masked."""

    key: str
    value: str
    source: str
    description: str


def load_config(
    path: Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> LoadedConfig:
    """Merge defaults, file, environment and flags.

    Args:
        path: the TOML file; None means ``$TIERKV_CONFIG``, else ``tierkv.toml`` here if present.
        flags: ``section.key`` to value; None values are skipped.
        environ: for tests; the process environment by default.

    Raises:
        ConfigError: unreadable file, unknown key or bad value.
    """
    env = os.environ if environ is None else environ  # noqa: TID251 - the one place
    sources: dict[str, str] = {key: "default" for key, _ in _known_fields()}
    values: dict[str, dict[str, Any]] = {}
    file = _find_file(path, env)
    if file is not None:
        _merge(values, sources, _read_file(file), source=str(file))
    _merge(values, sources, _from_environment(env), source="env")
    given = {key: value for key, value in (flags or {}).items() if value is not None}
    _merge(values, sources, given, source="flag")
    return LoadedConfig(settings=_validate(values, sources), sources=sources)


def plain_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without settings, for a child that has them all in a file."""
    env = os.environ if environ is None else environ  # noqa: TID251 - the one place
    return {name: value for name, value in env.items() if not name.startswith(ENV_PREFIX)}


def state_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of a user's own files: ``$XDG_STATE_HOME/tierkv``."""
    env = os.environ if environ is None else environ  # noqa: TID251 - the one place
    home = Path(env.get("XDG_STATE_HOME") or "")
    return (home if home.is_absolute() else Path("~/.local/state").expanduser()) / "tierkv"


def list_entries(config: LoadedConfig) -> list[ConfigEntry]:
    """Describe every setting, in the order of the sections; secrets are masked."""
    entries = []
    for key, description in _known_fields():
        section, name = key.split(".", 1)
        value = getattr(getattr(config.settings, section), name)
        shown = _render(value)
        if _is_secret(key, value):
            shown = str(SecretStr("x"))
        entries.append(ConfigEntry(key, shown, config.sources[key], description))
    return entries


def dump_toml(settings: Settings) -> str:
    """Write settings as TOML for ``load_config``, secrets included."""
    lines: list[str] = []
    for section, table in settings.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml_value(value)}" for name, value in table.items()]
    return "\n".join(lines) + "\n"


def changed_toml(
    loaded: LoadedConfig, more: Mapping[str, Any], *, leave_out: Collection[str] = ()
) -> str:
    """Write the settings that are not defaults as TOML for ``load_config``, secrets included.

    Args:
        loaded: the settings.
        more: further settings by ``section.key``.
        leave_out: settings that are not written.
    """
    lines: list[str] = []
    for section, table in loaded.settings.model_dump(mode="json").items():
        given = {
            name: value
            for name, value in table.items()
            if loaded.sources[f"{section}.{name}"] != "default"
        }
        given |= {
            key.partition(".")[2]: value
            for key, value in more.items()
            if key.startswith(f"{section}.")
        }
        kept = {n: value for n, value in given.items() if f"{section}.{n}" not in leave_out}
        if kept:
            lines += [f"[{section}]", *(f"{n} = {_toml_value(v)}" for n, v in kept.items()), ""]
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    """JSON's strings, numbers and booleans are also TOML; tables differ."""
    if isinstance(value, dict):
        pairs = (f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items())
        return "{" + ", ".join(pairs) + "}"
    return json.dumps(value, ensure_ascii=False)


def _render(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(str(part) for part in value) or repr("")
    return repr(value) if isinstance(value, str) and not value else str(value)


def _known_fields() -> Iterator[tuple[str, str]]:
    for section, field in Settings.model_fields.items():
        kind = field.annotation
        assert isinstance(kind, type) and issubclass(kind, Section)
        for name, inner in kind.model_fields.items():
            yield f"{section}.{name}", inner.description or ""


def _find_file(path: Path | None, env: Mapping[str, str]) -> Path | None:
    if path is not None:
        return path
    if env.get(CONFIG_ENV):
        return Path(env[CONFIG_ENV])
    here = Path("tierkv.toml")
    return here if here.is_file() else None


def _read_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            data = tomllib.load(stream)
    except FileNotFoundError:
        raise ConfigError(
            f"configuration file {path} does not exist", hint="Check --config or $TIERKV_CONFIG."
        ) from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} can't be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path} is not valid TOML: {error}") from None
    return _flatten(data, str(path))


def _flatten(data: Mapping[str, Any], origin: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, table in data.items():
        if section not in Settings.model_fields:
            raise _unknown(section, list(Settings.model_fields), origin, kind="section")
        if not isinstance(table, dict):
            raise ConfigError(f"{origin}: [{section}] must be a table, not {table!r}")
        for name, value in table.items():
            flat[f"{section}.{name}"] = value
    return flat


def _from_environment(env: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or variable == CONFIG_ENV:
            continue
        section, _, name = variable.removeprefix(ENV_PREFIX).lower().partition("_")
        found[f"{section}.{name}"] = (
            _from_json(variable, text) if text.startswith(("{", "[")) else text
        )
    return found


def _from_json(variable: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"environment variable {variable} is not valid JSON: {error}",
            hint='Write tables and lists as JSON, such as \'{"ann": "password"}\'.',
        ) from None


def _merge(
    values: dict[str, dict[str, Any]],
    sources: dict[str, str],
    layer: Mapping[str, Any],
    *,
    source: str,
) -> None:
    for key, value in layer.items():
        if key not in sources:
            raise _unknown(key, list(sources), source, kind="setting")
        section, name = key.split(".", 1)
        values.setdefault(section, {})[name] = value
        sources[key] = (
            f"env {ENV_PREFIX}{section}_{name}".upper().replace("ENV ", "env ")
            if (source == "env")
            else source
        )


def _unknown(key: str, known: list[str], origin: str, *, kind: str) -> ConfigError:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"Did you mean {near[0]}?" if near else "See `tierkv config show` for all settings."
    return ConfigError(f"unknown {kind} {key!r} ({origin})", hint=hint)


def _validate(values: dict[str, dict[str, Any]], sources: Mapping[str, str]) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:2])
        shown = str(SecretStr("x")) if _is_secret(key, first["input"]) else repr(first["input"])
        hint = "See `tierkv config show`, which describes every setting."
        if first["type"].startswith("byte_size"):
            hint = "Write a number of bytes, or a number with a unit: 512MiB, 4GiB, 10GB."
        raise ConfigError(
            f"{key} = {shown} is not valid ({sources.get(key, 'unknown')}): {first['msg']}",
            hint=hint,
        ) from None


def name_list(text: str) -> tuple[str, ...]:
    """Split a setting that lists names at commas and spaces."""
    return tuple(text.replace(",", " ").split())
