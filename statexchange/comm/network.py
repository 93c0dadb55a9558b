"""Addresses of this host's network interfaces."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

__all__ = ["address_of_interface", "addresses_of_name", "is_loopback", "own_addresses"]

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915
_IFF_UP = 1
_IPV6_TABLE = "/proc/net/if_inet6"  # address in hex, index, prefix length, scope, flags, interface
_GLOBAL_SCOPE = "00"


def is_loopback(address: str) -> bool:
    """Whether no other host can reach `address`."""
    return address.startswith("127.") or address == "::1"


def own_addresses() -> list[str]:
    """Return the IPv4 addresses of the interfaces that are up, loopback ones last."""
    found = [_ipv4_of(name) for _, name in socket.if_nameindex()]
    return sorted({address: None for address in found if address is not None}, key=is_loopback)


def address_of_interface(name: str) -> str | None:
    """Return the address of the interface `name`, IPv4 if it has one; None if it is down or has none."""
    return _ipv4_of(name) or _ipv6_of(name)


def addresses_of_name(host: str) -> list[str]:
    """Return the addresses that `host` resolves to, in the resolver's order; [] if it does not."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _ipv4_of(name: str) -> str | None:
    import fcntl

    request = struct.pack("256s", os.fsencode(name))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker, contextlib.suppress(OSError):
        flags = struct.unpack_from("H", fcntl.ioctl(asker, _SIOCGIFFLAGS, request), 16)[0]
        if flags & _IFF_UP:
            return socket.inet_ntoa(fcntl.ioctl(asker, _SIOCGIFADDR, request)[20:24])
    return None


def _ipv6_of(name: str) -> str | None:
    with contextlib.suppress(OSError), open(_IPV6_TABLE, encoding="ascii") as lines:
        for digits, _, _, scope, _, interface in map(str.split, lines):
            if interface == name and (scope == _GLOBAL_SCOPE or digits == "1".zfill(32)):
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return None
