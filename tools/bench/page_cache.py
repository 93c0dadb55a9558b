"""Look which pages of a file are in the page cache, for a bench and for a test."""

from __future__ import annotations

import ctypes
import mmap
import os

__all__ = ["cached_pages"]


def cached_pages(fd: int) -> list[bool]:
    """Return for each page of a file, which is not empty, whether it is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    size = os.fstat(fd).st_size
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    address = ctypes.c_void_p(libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, fd, 0))
    failed = libc.mincore(address, ctypes.c_size_t(size), pages)
    libc.munmap(address, ctypes.c_size_t(size))
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return [bool(page & 1) for page in pages]
