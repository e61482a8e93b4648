"""A CUDA stream of a loader thread's own, so that copies and decoding run beside the computation.

Used by compute/tiers/loader.py; on the CPU there is nothing to do: threads are enough there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def copies_beside(device: torch.device) -> Iterator[None]:
    """Queue this thread's GPU work on a new stream; what it wrote counts once it was waited for.

    The stream begins behind what is queued on the default stream now: kernels there may still read
    the pages that are about to be written.
    """
    if device.type != "cuda":
        yield
        return
    stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.default_stream(device))
    with torch.cuda.stream(stream):
        yield


def wait_for_copies(device: torch.device) -> None:
    """Wait until what this thread queued on its stream is done; other threads run meanwhile."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
