"""What a user may say of the tier beside how to reach the pool (integrations/settings.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from tierkv.kvcore.errors import ConfigError

WHERE = "secondary_tiers"
"""What messages call the mapping: its name in vLLM's configuration."""

_CHOICES = {"locality": ("", "LOCAL", "REMOTE"), "reset": ("forget", "keep")}


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Options of the tier alone.

    Attributes:
        revision: commit of a model that is no local folder.
        locality: LOCAL or REMOTE, for vLLM's own filters of tiers by request; empty: neither.
        reset: what a reset of vLLM's caches does: ``forget`` what was stored, because weights may
            have changed, or ``keep`` it.
        enable_kv_events: tell vLLM's listeners of chunks that are in the pool now.
    """

    revision: str = ""
    locality: str = ""
    reset: str = "forget"
    enable_kv_events: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """Take what is ours out of a mapping that others check for names.

        Raises:
            ConfigError: a value that can't be used.
        """
        values: dict[str, Any] = {}
        for option in fields(cls):
            value = given.get(option.name)
            if value is None:
                continue
            if type(value) is not type(option.default):
                raise ConfigError(f"{WHERE}: {option.name} = {value!r} is of the wrong type")
            choices = _CHOICES.get(option.name)
            if choices is not None and value not in choices:
                raise ConfigError(
                    f"{WHERE}: {option.name} = {value!r} is none of {', '.join(choices)}"
                )
            values[option.name] = value
        return cls(**values)


NAMES = tuple(option.name for option in fields(TierOptions))
