"""Settings of the vLLM connector beyond the common settings of all engines.

Read from vLLM's ``kv_connector_extra_config`` and ``kv_role``. integrations/settings.py reads the
common settings from the same mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Self

from tierkv.kvcore.errors import ConfigError

BETWEEN_STEPS: Final = "between_steps"
LAYER_BY_LAYER: Final = "layer_by_layer"
AUTO: Final = "auto"
ALWAYS: Final = "always"
_WHERE: Final = "kv_connector_extra_config"
_NUMBERS: Final = {
    "lookup_timeout_ms": (1, 60_000),
    "load_timeout_ms": (1, 600_000),
    "handoff_timeout_ms": (1, 600_000),
}


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Behaviour of the connector.

    Attributes:
        load_mode: ``between_steps``: a request waits for its blocks while other requests run;
            ``layer_by_layer``: the request's step begins at once, and each layer waits for its own
            part.
        load_policy: ``auto``: blocks are loaded only if computing is slower; ``always``: all
            available blocks are loaded. Loads layer by layer overlap with computing, and are always
            made.
        lookup_timeout_ms: longest wait for a lookup; then everything is computed.
        load_timeout_ms: longest load; then missing blocks are computed.
        handoff_timeout_ms: longest wait for blocks that a prefill engine promised.
        saves: True if blocks are saved to the pool.
        loads: True if blocks are loaded from the pool.
    """

    load_mode: str = BETWEEN_STEPS
    load_policy: str = AUTO
    lookup_timeout_ms: int = 500
    load_timeout_ms: int = 5_000
    handoff_timeout_ms: int = 2_000
    saves: bool = True
    loads: bool = True

    @property
    def in_step(self) -> bool:
        """True if loads are part of the step that uses them."""
        return self.load_mode == LAYER_BY_LAYER

    @property
    def weighs(self) -> bool:
        """True if loading is weighed against computing."""
        return self.load_policy == AUTO and not self.in_step

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the settings read here."""
        return tuple(f.name for f in fields(cls) if f.name not in ("saves", "loads"))

    @classmethod
    def read(cls, given: Mapping[str, Any], *, saves: bool, loads: bool) -> Self:
        """Check the mapping of an engine.

        Raises:
            ConfigError: a value can't be used.
        """
        mode = _choice(given, "load_mode", (BETWEEN_STEPS, LAYER_BY_LAYER))
        policy = _choice(given, "load_policy", (AUTO, ALWAYS))
        numbers: dict[str, int] = {}
        for name, (least, most) in _NUMBERS.items():
            value = given.get(name, getattr(cls(), name))
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(
                    f"{_WHERE}: {name} = {str(value)[:40]!r} is not a whole number from "
                    f"{least} to {most}"
                )
            numbers[name] = value
        return cls(mode, policy, **numbers, saves=saves, loads=loads)


def _choice(given: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    """Read one of several words; the first is the default."""
    value = given.get(name, choices[0])
    if value not in choices:
        raise ConfigError(
            f"{_WHERE}: {name} = {str(value)[:40]!r} is not valid",
            hint=f"Use {' or '.join(choices)}.",
        )
    return str(value)
