"""What a random job holds, as texts, by names that do not depend on order."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from equality import bits_of
from job_models import Job
from torch import nn

IS_RANDOM_STATE = re.compile(r":object:'(torch|numpy|python|cuda)'")


def show(value: Any) -> str:
    """Return a value as a text that has its types and bits."""
    if isinstance(value, torch.Tensor):
        dtype, shape, content = bits_of(value.detach())
        return f"{dtype}{list(shape)}{content.hex()}"
    if isinstance(value, dict):
        items = sorted(f"{type(key).__name__} {key!r}: {show(item)}" for key, item in value.items())
        return f"{type(value).__name__}{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[{', '.join(map(show, value))}]"
    if dataclasses.is_dataclass(value):
        return f"{type(value).__name__}({show(value.first)}, {show(value.second)})"
    if callable(getattr(value, "state_dict", None)):
        return f"{type(value).__name__}<{show(value.state_dict())}>"
    return f"{type(value).__name__} {value!r}"


def atoms(state: Any, job: Job) -> dict[str, str]:
    """Return each value of a state, as a text, by a name that does not depend on order."""
    found: dict[str, str] = {}
    names = {id(one): name for name, one in job.parameters.items()}

    def add(value: Any, path: str) -> None:
        if isinstance(value, nn.Module):
            for name, tensor in value.state_dict().items():
                found[f"{path}:{_bare(name)}"] = show(tensor)
        elif isinstance(value, torch.optim.Optimizer):
            for group in value.param_groups:
                for one in group["params"]:
                    for key, item in group.items():
                        if key not in ("params", "param_names"):
                            found[f"{path}:group:{names[id(one)]}:{key}"] = show(item)
                    for key, item in value.state.get(one, {}).items():
                        found[f"{path}:state:{names[id(one)]}:{key}"] = show(item)
            for key, item in value.state.items():
                if not isinstance(key, torch.Tensor):
                    found[f"{path}:shared:{key!r}"] = show(item)
        elif hasattr(value, "load_state_dict"):
            for key, item in value.state_dict().items():
                found[f"{path}:object:{key!r}"] = show(item)
        elif isinstance(value, dict):
            found[f"{path}:type"] = type(value).__name__ + ("" if value else " empty")
            for key, item in value.items():
                add(item, f"{path}/{key!r}")
        elif isinstance(value, list | tuple):
            found[f"{path}:type"] = f"{type(value).__name__} {len(value)}"
            for key, item in enumerate(value):
                add(item, f"{path}/{key}")
        elif dataclasses.is_dataclass(value):
            add(value.first, f"{path}/first")
            add(value.second, f"{path}/second")
        else:
            found[path] = show(value)

    add(state, "")
    return found


def _bare(name: str) -> str:
    name = ".".join(part for part in name.split(".") if part != "_orig_mod")
    return name.removeprefix("module.")


def plain(found: dict[str, str]) -> dict[str, str]:
    """Return atoms without the types of containers, which are those of the live state, and without random states."""
    return {
        key: re.sub(r"(Counter|OrderedDict|defaultdict)\{", "dict{", value)
        for key, value in found.items()
        if not key.endswith(":type") and not IS_RANDOM_STATE.search(key)
    }
