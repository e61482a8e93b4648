"""Prices of pool memory by region, for the cost of a pool per saved node.

Read by ``tierkv simulate --cost`` and tierkv.simulate in SQL from simulator/prices.toml or a file
of the same form.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tierkv.kvcore.errors import ConfigError

SHIPPED: Final = Path(__file__).parent / "prices.toml"


@dataclass(frozen=True, slots=True)
class PriceList:
    """Prices of memory.

    Attributes:
        currency: currency of the prices.
        per_gb_month: price by region.
    """

    currency: str
    per_gb_month: Mapping[str, float]

    def regions(self, wanted: Sequence[str]) -> tuple[str, ...]:
        """Return the wanted regions, or all regions if ``wanted`` is empty.

        Spaces, hyphens, underscores and case are ignored: ``Hong Kong`` is ``hong_kong``.

        Raises:
            ConfigError: a region has no price.
        """
        names = {_plain(name): name for name in self.per_gb_month}
        for region in wanted:
            if _plain(region) not in names:
                known = ", ".join(self.per_gb_month)
                raise ConfigError(f"no price for region {region!r}; known: {known}")
        return tuple(names[_plain(region)] for region in wanted) or tuple(self.per_gb_month)


def load_prices(path: Path | None = None) -> PriceList:
    """Read a price list; None means simulator/prices.toml.

    Raises:
        ConfigError: the file can't be read, or a price is not a positive number.
    """
    file = path or SHIPPED
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"price list {file} can't be read: {error.strerror}", hint="Name one with --prices."
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"price list {file} is not valid TOML: {error}") from None
    regions = data.get("regions")
    if not isinstance(regions, dict) or not regions:
        raise ConfigError(f"price list {file} has no table [regions]; see simulator/prices.toml")
    for region, price in regions.items():
        usable = isinstance(price, int | float) and not isinstance(price, bool)
        if not usable or not 0 < price < math.inf:
            raise ConfigError(f"{file}: regions.{region} = {price!r} must be a positive price")
    return PriceList(str(data.get("currency", "")), regions)


def _plain(name: str) -> str:
    return "".join(letter for letter in name.casefold() if letter.isalnum())
