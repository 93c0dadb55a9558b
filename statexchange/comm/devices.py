"""The device on which a rank computes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, Literal, cast

from statexchange.errors import InvalidArgumentError, UnsupportedError

__all__ = ["Devices", "check_devices", "choose"]

Devices = Sequence[Any] | Literal[False] | None


def choose(devices: Devices, local_rank: int) -> str:
    """Return the name of this rank's device; a GPU becomes torch's current one. `devices` is the argument of `init`.

    Not collective.
    """
    if devices is False:
        return "cpu"
    if devices is None:
        num_gpus = _num_gpus() if importlib.util.find_spec("torch") is not None else 0
        return _use(f"cuda:{local_rank % num_gpus}") if num_gpus else "cpu"
    if not 0 <= local_rank < len(devices):
        raise InvalidArgumentError(f"devices={list(devices)} has no device for local_rank {local_rank}")
    return _use(_name(devices[local_rank], devices))


def check_devices(devices: object) -> None:
    """Raise InvalidArgumentError unless `devices` is of a type that `init` takes. Not collective."""
    is_list = isinstance(devices, Sequence) and not isinstance(devices, (str, bytes))
    if not (devices is None or devices is False or is_list):
        raise InvalidArgumentError(f"devices is None, False or a list with a device for each rank, not {devices!r}")


def _num_gpus() -> int:
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def _name(entry: object, devices: Sequence[Any]) -> str:
    import torch

    try:
        if isinstance(entry, bool):
            raise TypeError("neither a number nor a name")
        device = torch.device("cuda", entry) if isinstance(entry, int) else torch.device(cast("str", entry))
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(f"devices={list(devices)}: {entry!r} is no device") from error
    if device.type == "cuda" and (device.index or 0) >= _num_gpus():
        raise InvalidArgumentError(f"devices={list(devices)}: there is no {device}, this host has {_num_gpus()} GPUs")
    return str(device)


def _use(name: str) -> str:
    if name.startswith("cuda"):
        import torch

        try:
            torch.cuda.set_device(name)
        except RuntimeError as error:  # as in a process that was forked after its parent had used CUDA
            text = f"this process cannot use {name}: {error}. Start it by spawn, or give init devices=False"
            raise UnsupportedError(text) from error
    return name
