"""GPU memory as a dmabuf, the form in which Linux lends one device's memory to another.

Called by dmp/transport/verbs/fabric.py. Asks the CUDA driver directly, because only compute/ may
import torch; the caller's process has a CUDA context already, or it would have no such memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Final

from tierkv.kvcore.errors import TransportError

_DRIVER: Final = "libcuda.so.1"
_DMA_BUF_FD: Final = 1
"""CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD."""


@contextlib.contextmanager
def exported_dmabuf(address: int, size: int) -> Iterator[int]:
    """Give a file descriptor for a range of GPU memory; registrations outlive it.

    Raises:
        TransportError: there is no CUDA driver, or it exports no such range.
    """
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError as error:
        raise TransportError(f"no GPU memory: {error}") from error
    fd = ctypes.c_int(-1)
    status = driver.cuMemGetHandleForAddressRange(
        ctypes.byref(fd),
        ctypes.c_uint64(address),
        ctypes.c_size_t(size),
        ctypes.c_int(_DMA_BUF_FD),
        ctypes.c_ulonglong(0),
    )
    if status != 0:
        raise TransportError(f"the GPU exports no dmabuf of its memory (CUDA error {status})")
    try:
        yield fd.value
    finally:
        os.close(fd.value)
