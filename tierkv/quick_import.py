"""Imports of heavy libraries, quicker."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collecting_nothing() -> Iterator[None]:
    """Import within: many objects are made and none is garbage, but looking for it takes long.

    Measured on ``import torch``: a seventh of its time.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
