"""Constants of the simulated cluster: a model on a machine, its nodes, the published routers.

Read from simulator/models.toml or a file of the same form; used by the cluster simulation only. The
comments of models.toml give the formula of the prefill time.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from tierkv.costing.service_time import StepCost
from tierkv.kvcore.errors import ConfigError
from tierkv.kvcore.layout import BlockLayout, KvDtype

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServingModel:
    """A model on a machine.

    Attributes:
        description: text for people.
        layers: decoder layers.
        kv_heads: key/value heads per layer.
        head_dim: channels per head.
        flop_per_token: operations per computed token.
        flop_per_pair: operations per (query, key) pair of attention, all layers.
        flop_per_s: operations per second that the node reaches.
        fixed_s: seconds of a prefill, however short.
        tpot_s: seconds per generated token without a concurrent prefill.
    """

    description: str
    layers: int
    kv_heads: int
    head_dim: int
    flop_per_token: float
    flop_per_pair: float
    flop_per_s: float
    fixed_s: float
    tpot_s: float

    def layout(self, block_tokens: int) -> BlockLayout:
        """Return the layout of one block of KV, in bfloat16."""
        return BlockLayout(
            self.layers, self.kv_heads, self.head_dim, KvDtype.BFLOAT16, block_tokens=block_tokens
        )

    @property
    def cost(self) -> StepCost:
        """Cost of computing."""
        return StepCost(
            self.flop_per_token / self.flop_per_s,
            self.flop_per_pair / self.flop_per_s,
            self.fixed_s,
        )

    def prefill_s(self, reused_tokens: int, new_tokens: int) -> float:
        """Return the seconds to compute tokens after reused tokens; 0.0 without new tokens."""
        if new_tokens <= 0:
            return 0.0
        return self.cost.causal_seconds(reused_tokens, new_tokens)


@dataclass(frozen=True, slots=True)
class NodeConstants:
    """Constants of nodes and pool, explained in the comments of models.toml."""

    heartbeat_s: float
    decode_slots: int
    decode_harm: float
    write_backlog_s: float
    write_share: float
    fetch_latency_s: float


@dataclass(frozen=True, slots=True)
class RouterConstants:
    """Constants of the published routers."""

    dynamo_shared_credit: float
    conductor_threshold: float


@dataclass(frozen=True, slots=True)
class Constants:
    """Everything in one constants file."""

    models: Mapping[str, ServingModel]
    cluster: NodeConstants
    routers: RouterConstants

    def model(self, name: str) -> ServingModel:
        """Return a model by name.

        Raises:
            ConfigError: the name is unknown.
        """
        if name not in self.models:
            known = ", ".join(sorted(self.models))
            raise ConfigError(f"unknown model {name!r} in the simulator; known: {known}")
        return self.models[name]


def load_constants(path: Path | None = None) -> Constants:
    """Read a constants file; None means simulator/models.toml.

    Raises:
        ConfigError: the file can't be read, or a number is missing, unknown or out of range.
    """
    name = str(path or "simulator/models.toml")
    try:
        text = path.read_text() if path else _shipped()
        data = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"constants file {name} can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"constants file {name} is not valid TOML: {error}") from None
    models = {
        key: _make(ServingModel, table, f"{name}: [models.{key}]")
        for key, table in _table(data, "models", name).items()
    }
    cluster = _make(NodeConstants, _table(data, "cluster", name), f"{name}: [cluster]")
    routers = _make(RouterConstants, _table(data, "routers", name), f"{name}: [routers]")
    if cluster.decode_harm >= 1.0:
        raise ConfigError(f"{name}: [cluster] decode_harm must be below 1, or answers never end")
    if cluster.write_share > 1.0:
        raise ConfigError(f"{name}: [cluster] write_share must be at most 1")
    return Constants(models, cluster, routers)


def _shipped() -> str:
    return resources.files("tierkv.simulator").joinpath("models.toml").read_text(encoding="utf-8")


def _table(data: Mapping[str, Any], section: str, name: str) -> Mapping[str, Any]:
    table = data.get(section)
    if not isinstance(table, dict):
        raise ConfigError(f"{name} has no table [{section}]; start from simulator/models.toml")
    return table


def _make(kind: type[T], table: Any, where: str) -> T:
    """Build a value from a table with exactly its fields; numbers must not be negative."""
    wanted = {field.name: field.type for field in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(table, dict) or set(table) != set(wanted):
        raise ConfigError(f"{where} must have exactly: {', '.join(wanted)}")
    values: dict[str, Any] = {}
    for key, value in table.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if wanted[key] == "str":
            values[key] = str(value)
        elif not is_number or not 0 <= value < float("inf"):
            raise ConfigError(f"{where} {key} = {value!r} must be a number, not negative")
        else:
            values[key] = int(value) if wanted[key] == "int" else float(value)
    for key in ("flop_per_s", "decode_slots", "heartbeat_s", "conductor_threshold"):
        if values.get(key, 1) <= 0:
            raise ConfigError(f"{where} {key} must be positive")
    return kind(**values)
