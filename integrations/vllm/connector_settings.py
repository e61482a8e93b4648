"""What the connector is told beside what every engine is told about the pool.

Read from vLLM's ``kv_connector_extra_config`` and its ``kv_role``; integrations/settings.py reads
the rest of the same mapping.
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
    """How the connector behaves.

    Attributes:
        load_mode: ``between_steps``: a request waits until its blocks are there, others go on;
            ``layer_by_layer``: its step begins at once, and each layer waits for its own part.
        load_policy: ``auto``: what is computed faster is not loaded; ``always``: all that is there
            is. Loads layer by layer overlap with computing, and are always made.
        lookup_timeout_ms: longest wait for the pool to say what it has; then all is computed.
        load_timeout_ms: longest load; what is not there then is computed.
        handoff_timeout_ms: longest wait for blocks that a prefill engine promised.
        saves: whether blocks go to the pool.
        loads: whether they come from it.
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
        """Whether loads are part of the step that uses them."""
        return self.load_mode == LAYER_BY_LAYER

    @property
    def weighs(self) -> bool:
        """Whether loading is weighed against computing."""
        return self.load_policy == AUTO and not self.in_step

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names that are read here."""
        return tuple(f.name for f in fields(cls) if f.name not in ("saves", "loads"))

    @classmethod
    def read(cls, given: Mapping[str, Any], *, saves: bool, loads: bool) -> Self:
        """Check what the engine was told.

        Raises:
            ConfigError: a value that can't be used.
        """
        mode = _choice(given, "load_mode", (BETWEEN_STEPS, LAYER_BY_LAYER))
        policy = _choice(given, "load_policy", (AUTO, ALWAYS))
        numbers: dict[str, int] = {}
        for name, (least, most) in _NUMBERS.items():
            value = given.get(name, getattr(cls(), name))
            if type(value) is not int or not least <= value <= most:
                raise ConfigError(
                    f"{_WHERE}: {name} = {str(value)[:40]!r} is no number from {least} to {most}"
                )
            numbers[name] = value
        return cls(mode, policy, **numbers, saves=saves, loads=loads)


def _choice(given: Mapping[str, Any], name: str, choices: tuple[str, ...]) -> str:
    """Read one of several words; the first is the default."""
    value = given.get(name, choices[0])
    if value not in choices:
        raise ConfigError(f"{_WHERE}: {name} = {str(value)[:40]!r}", hint=" or ".join(choices))
    return str(value)
