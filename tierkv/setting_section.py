"""The base of all sections of settings (tierkv/settings.py, tierkv/front_settings.py)."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the TOML file; the loader refuses unknown keys with a suggestion."""

    model_config = ConfigDict(frozen=True, extra="forbid")
