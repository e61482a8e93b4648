"""Tests on a device: all run on the CPU too, so that a machine without CUDA keeps them alive."""

from __future__ import annotations

import pytest
import torch

_NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _NO_CUDA])])
def device(request) -> str:
    """Return where the model and its pages are."""
    return request.param


@pytest.fixture
def cuda() -> torch.device:
    """Return the CUDA device, or skip."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device("cuda")
