"""Message slots of the control page.

A slot holds 8 bytes, little endian, and then a message. The top bit of the 8 bytes is a flag, the others are the length
of the message. With the flag SPILLED the message is the address of an arena that holds the actual, longer message.
"""

from __future__ import annotations

__all__ = ["LENGTH_BYTES", "SPILLED", "is_spilled", "read_slot", "write_slot"]

LENGTH_BYTES = 8
SPILLED = 1 << 63


def write_slot(slot: memoryview, data: bytes, flag: int) -> None:
    """Write a message with its length and flag."""
    slot[:LENGTH_BYTES] = (len(data) | flag).to_bytes(LENGTH_BYTES, "little")
    slot[LENGTH_BYTES : LENGTH_BYTES + len(data)] = data


def is_spilled(slot: memoryview) -> bool:
    """Whether the message in a slot is the address of a long one."""
    return bool(slot[LENGTH_BYTES - 1] & 0x80)


def read_slot(slot: memoryview) -> tuple[bytes, bool]:
    """Return the message in a slot, and whether it is the address of a long one."""
    word = int.from_bytes(slot[:LENGTH_BYTES], "little")
    length = word & ~SPILLED
    return bytes(slot[LENGTH_BYTES : LENGTH_BYTES + length]), bool(word & SPILLED)
