"""Addresses of this host's network interfaces."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
import struct

# Of Linux' sockios.h and if.h: Python has no names for them.
_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP = 1


def addresses() -> list[str]:
    """Return the addresses at which other hosts may reach this one: those of its interfaces, and its name.

    Loopback addresses, at which only this host reaches itself, come last. The name is not resolved here: that may take
    long, and it is needed only on a host without IPv4.
    """
    of_interfaces: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            of_interfaces += _addresses_of(name, asker)
    # `sorted` is stable: the other interfaces keep the kernel's order.
    return sorted(dict.fromkeys([*of_interfaces, platform.node()]), key=lambda address: address.startswith("127."))


def _addresses_of(interface: str, asker: socket.socket) -> list[str]:
    """Return the IPv4 address of an interface, if it is up and has one."""
    import fcntl

    # A struct ifreq: 16 bytes of name, then the answer, which is the flags or a sockaddr_in (family, port, address).
    request = struct.pack("256s", os.fsencode(interface))
    with contextlib.suppress(OSError):  # it has no address
        flags = struct.unpack_from("H", fcntl.ioctl(asker, _SIOCGIFFLAGS, request), 16)[0]
        if flags & _IFF_UP:
            return [socket.inet_ntoa(fcntl.ioctl(asker, _SIOCGIFADDR, request)[20:24])]
    return []
