"""A session's ``tierkv.*`` settings: values, sources and transactions.

As in PostgreSQL, a rollback undoes SET inside the transaction, and SET LOCAL ends with its
transaction. sql/settings.py defines valid names and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tierkv.dbfront.contracts import CallDefaults, ClientInfo
from tierkv.dbfront.statement.error_policy import ErrorPolicy
from tierkv.kvcore.call_options import OPTIONS, USUAL, CallOptions
from tierkv.sql.settings import (
    SETTINGS,
    FieldReorder,
    SettingValue,
    parse_setting,
    setting_spec,
)


class SessionSettings:
    """Values of one session.

    Attributes:
        _values: settings that differ from the server's defaults.
        _at_begin: ``_values`` when the open transaction began; None outside transactions.
        _local: names that SET LOCAL changed in the open transaction.
    """

    def __init__(
        self, defaults: Mapping[str, str] | None = None, client: Mapping[str, str] | None = None
    ) -> None:
        """Start from the server's defaults and the client's connection options.

        Raises:
            UserError: an unknown name or invalid value.
        """
        self._server = {name: parse_setting(name, text) for name, text in (defaults or {}).items()}
        self._values: dict[str, SettingValue] = {
            name: parse_setting(name, text) for name, text in (client or {}).items()
        }
        self._at_begin: dict[str, SettingValue] | None = None
        self._local: set[str] = set()

    def get(self, name: str) -> SettingValue:
        """Return a setting's value."""
        spec = setting_spec(name)
        if spec.name in self._values:
            return self._values[spec.name]
        return self._server.get(spec.name, spec.default)

    def show(self, name: str) -> str:
        """Return a setting's value as SHOW prints it."""
        return setting_spec(name).shown(self.get(name))

    def set(self, name: str, text: str | None, *, local: bool = False) -> None:
        """Change a setting; ``text`` None restores the default."""
        spec = setting_spec(name)
        if text is None:
            self._values.pop(spec.name, None)
        else:
            self._values[spec.name] = parse_setting(spec.name, text)
        if local:
            self._local.add(spec.name)

    def reset_all(self) -> None:
        """Restore the server's defaults."""
        self._values.clear()

    def begin(self) -> None:
        """Save the values for a rollback."""
        self._at_begin = dict(self._values)
        self._local.clear()

    def remember(self) -> Callable[[], None]:
        """Return a function that restores the present values, for a savepoint."""
        values, local = dict(self._values), set(self._local)

        def restore() -> None:
            self._values, self._local = dict(values), set(local)

        return restore

    def end(self, *, committed: bool) -> None:
        """Undo SET LOCAL, and every SET when the transaction was rolled back."""
        if self._at_begin is not None:
            undone = self._local if committed else set(self._values) | set(self._at_begin)
            for name in undone:
                if name in self._at_begin:
                    self._values[name] = self._at_begin[name]
                else:
                    self._values.pop(name, None)
        self._at_begin = None
        self._local.clear()

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return name, value, source and description of every setting."""
        return [
            (spec.name, self.show(spec.name), self._source(spec.name), spec.description)
            for spec in SETTINGS.values()
        ]

    def error_policy(self) -> ErrorPolicy:
        """Return the policy for failed calls and large statements of this session."""
        return ErrorPolicy(
            on_error=str(self.get("tierkv.on_error")),
            max_error_ratio=float(self.get("tierkv.max_error_ratio") or 0),
            max_calls=int(self.get("tierkv.max_calls") or 0),
            notice_calls=int(self.get("tierkv.notice_calls") or 0),
            max_prompt_tokens=int(self.get("tierkv.max_prompt_tokens") or 0),
            max_completion_tokens=int(self.get("tierkv.max_completion_tokens") or 0),
            dry_run=bool(self.get("tierkv.dry_run")),
        )

    def call_defaults(self, tenant: str, client: ClientInfo) -> CallDefaults:
        """Return the session's defaults for options that AI calls leave unset."""
        return CallDefaults(
            options=self._call_options(),
            model=str(self.get("tierkv.model")) or None,
            system_prompt=str(self.get("tierkv.system_prompt")),
            tenant=tenant,
            key=client.key,
            session=client.session,
            prefix_order=bool(self.get("tierkv.prefix_order")),
            plan=bool(self.get("tierkv.plan")),
            max_concurrency=int(self.get("tierkv.max_concurrency") or 1),
            field_reorder=FieldReorder(str(self.get("tierkv.field_reorder"))),
            bulk_calls=int(self.get("tierkv.bulk_calls") or 0),
        )

    def _call_options(self) -> CallOptions:
        asked: dict[str, Any] = {
            option.name: option.setting.to_option(self.get(f"tierkv.{option.setting.name}"))
            for option in OPTIONS
            if option.setting is not None
        }
        return CallOptions(**asked).over(USUAL)

    def _source(self, name: str) -> str:
        if name in self._values:
            return "session"
        return "server" if name in self._server else "default"
