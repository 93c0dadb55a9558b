"""System calls that fail in this process, without a tracer, which would stop it at each fork and signal."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

RENAMEAT2 = {"x86_64": 316, "aarch64": 276}  # its number, by machine
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 22, 38
_MODE_FILTER = 2
_LOAD_WORD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def refuse_exchange() -> None:
    """Let renameat2 fail in this process and all that it starts: names cannot be exchanged then, as on NFS."""
    instructions = [
        (_LOAD_WORD, 0, 0, 0),  # the number of the system call
        (_JUMP_IF_EQUAL, 0, 1, RENAMEAT2[platform.machine()]),
        (_RETURN, 0, 0, _ERRNO | errno.EINVAL),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in instructions))
    program = ctypes.create_string_buffer(struct.pack("HP", len(instructions), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value, pointer in ((_PR_SET_NO_NEW_PRIVS, 1, None), (_PR_SET_SECCOMP, _MODE_FILTER, program)):
        if libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0):
            raise OSError(ctypes.get_errno(), f"prctl {option}: {os.strerror(ctypes.get_errno())}")
