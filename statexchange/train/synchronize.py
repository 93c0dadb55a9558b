"""Ranks made alike: any tree of state takes root's values, and a module's parameters are broadcast or averaged.

Before a tensor moves, the ranks compare a digest of what each holds: paths, kinds, shapes and dtypes. With its own,
root sends what is no tensor, as JSON. Tensors follow as bytes, many small ones together and large ones in windows.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import itertools
from collections.abc import Callable, Generator, Iterator, Mapping, MappingView, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from statexchange import values
from statexchange.comm.communicator import Communicator
from statexchange.comm.world import as_communicator
from statexchange.errors import InvalidArgumentError, MismatchError, UnsupportedError
from statexchange.layout.tree import flatten, nodes, rebuild

__all__ = ["allreduce_parameters", "broadcast_parameters", "synchronize"]

T = TypeVar("T")
Memory = Any  # a dense torch tensor, detached, or a numpy array
_WINDOW_BYTES = 64 << 20  # of memory that travels at a time: what is copied for it is no larger
_ALONE_BYTES = 1 << 20  # from which on a tensor travels by itself, and so without a copy
_ALIGNED = 16  # where any dtype may begin
_SHOWN = 8  # of the ranks that an error names
_VALUE, _OBJECT = "a value", "an object"


def synchronize(tree: T, *, root: int = 0, comm: Any = None) -> T:
    """`tree` with root's values: tensors and what else can be changed in place, anything else in what is returned.

    Collective; blocks until all ranks have called. `tree` is any nesting of mappings, lists, tuples, namedtuples and
    dataclasses (the order of keys is nothing) and holds

    * torch tensors (also non-contiguous or requiring grad) and numpy arrays: the same objects, filled with root's data;
    * numbers, strings, enums, torch dtypes and None, whose place takes root's; None may stand for any other of them;
    * modules: parameters and all buffers, persistent or not, by name; each tied tensor travels once; names in torch's
      `_ddp_params_and_buffers_to_ignore` stay this rank's own;
    * optimizers: hyperparameters and state become root's, whatever this rank had; what it lacks is made and what root
      lacks is dropped, so that a resumed root seeds fresh ranks. The parameters themselves are the module's;
    * objects with `state_dict` and `load_state_dict`, such as LR schedulers: likewise.

    Any other object stays this rank's own. So do devices, paths, bytes and functions.

    Ranks whose trees differ in paths, kinds, shapes or dtypes all raise one MismatchError, with both sides at the first
    path that differs, and nothing has changed. UnsupportedError or InvalidArgumentError, naming the path: sharded
    DTensors (replicated ones are filled), sparse, quantised, meta or lazy tensors, arrays of objects, generators,
    cycles. Memory beyond the tree: at most 64 MiB at a time.
    """
    communicator = as_communicator(comm)

    def describe(*, written: bool) -> _Content:
        content = _Content(written=written)
        content.add_tree(tree)
        return content

    with communicator.phase("synchronize"):
        filled: T = rebuild(tree, _fill(communicator, root, describe), _is_leaf)
    return filled


def broadcast_parameters(module: nn.Module, *, broadcast_buffers: bool = True, root: int = 0, comm: Any = None) -> None:
    """Root's parameters and, if asked, buffers in this rank's `module`, in place, as `synchronize` does it. Collective.

    Names in torch's `_ddp_params_and_buffers_to_ignore` are left out.
    """
    communicator = as_communicator(comm)

    def describe(*, written: bool) -> _Content:
        return _module_content(module, written=written, buffers=broadcast_buffers)

    with communicator.phase("broadcast_parameters"):
        _fill(communicator, root, describe)


def allreduce_parameters(module: nn.Module, *, comm: Any = None) -> None:
    """The mean over all ranks in every parameter and buffer of `module`, in place; integers and bools from rank 0.

    Collective; blocks until all ranks have called. Each tied tensor counts once; names in torch's
    `_ddp_params_and_buffers_to_ignore` are left out. Errors are those of `synchronize`; float8 is an UnsupportedError.
    """
    communicator = as_communicator(comm)

    def describe(*, written: bool) -> _Content:  # noqa: ARG001 (the mean is written on every rank)
        content = _module_content(module, written=True)
        for name, tensor in content.memories.items():
            if tensor.is_floating_point() and tensor.itemsize == 1:
                raise UnsupportedError(f"{tensor.dtype} cannot be averaged", name=name)
        return content

    with communicator.phase("allreduce_parameters"):
        content, _ = _compare(communicator, 0, describe)
        tensors = list(content.memories.values())
        inexact = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
        exact = [tensor for tensor in tensors if not (tensor.is_floating_point() or tensor.is_complex())]
        _broadcast(communicator, exact, 0)
        for window in _windows(inexact):
            communicator.all_reduce_multiple(window, "avg")


# What a rank holds


class _Content:
    """What one rank holds, sorted by how it travels; `lines` say it in words that ranks can compare.

    `written` says that this rank's memory will be filled. Each memory is listed once, in an order that all ranks share.
    """

    def __init__(self, *, written: bool) -> None:
        self.lines: list[tuple[str, str]] = []
        self.memories: dict[str, Memory] = {}
        self.values: dict[str, Any] = {}
        self.keepers: dict[str, Any] = {}
        """Optimizers and other objects that keep a state, by path."""
        self._written = written
        self._seen: dict[tuple[Any, ...], str] = {}

    @property
    def digest(self) -> str:
        """Equal on ranks that hold the same."""
        text = "\n".join(f"{path}\t{line}" for path, line in self.lines)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def kinds(self) -> list[str | None]:
        """The kinds of the plain values, in an order that all ranks share."""
        return [_kind(value) for value in self.values.values()]

    def places(self) -> list[tuple[str, str, str | None, str]]:
        """Of each line the path, the line, the kind of its value if it is one, and the words to show it in."""
        return [
            (path, line, _kind(self.values[path]), f"{line}, {self.values[path]!r:.60}")
            if line == _VALUE
            else (path, line, None, line)
            for path, line in self.lines
        ]

    def add_tree(self, tree: Any) -> None:
        """All that lies in `tree`."""
        for node in nodes(tree, _is_leaf):
            if node.container is not None:
                self.lines.append((node.path, node.container))
            else:
                self._add_leaf(node.path, node.value)

    def _add_leaf(self, path: str, leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor | np.ndarray):
            self._add_memory(path, leaf)
        elif isinstance(leaf, nn.Module):
            self.add_module(path, leaf, buffers=True)
        elif _is_optimizer(leaf):
            self._add_optimizer(path, leaf)
        elif _keeps_state(leaf):
            self.lines.append((path, f"the state of a {type(leaf).__name__}"))
            self.keepers[path] = leaf
        elif _kind(leaf) is not None:
            self.lines.append((path, _VALUE))
            self.values[path] = leaf
        elif isinstance(leaf, Generator | MappingView):
            raise InvalidArgumentError(f"a {type(leaf).__name__} has no places to fill: give a list", name=path)
        else:
            self.lines.append((path, _OBJECT))

    def add_module(self, path: str, module: nn.Module, *, buffers: bool) -> None:
        """The parameters of a module and, if asked, its buffers."""
        self.lines.append((path, "a module"))
        named: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
        if buffers:
            named.update(module.named_buffers(remove_duplicate=False))
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        for name in sorted(named.keys() - ignored):
            self._add_memory(f"{path}.{name}" if path else name, named[name])

    def _add_memory(self, path: str, given: Any) -> None:
        memory = _memory_of(given, path, written=self._written)
        key = _place_of(memory)
        first = path if key is None else self._seen.setdefault(key, path)
        if first == path:
            self.lines.append((path, _text(memory)))
            self.memories[path] = memory
        else:
            self.lines.append((path, f"the same as {first}"))

    def _add_optimizer(self, path: str, optimizer: Any) -> None:
        kind = type(optimizer).__name__
        if kind == "ZeroRedundancyOptimizer":
            raise UnsupportedError("each rank's ZeroRedundancyOptimizer has a state of its own", name=path)
        groups = optimizer.param_groups
        self.lines.append((path, f"an optimizer {kind}"))
        self.lines.append((f"{path}.param_groups", f"list of {len(groups)}"))
        for i, group in enumerate(groups):
            at = f"{path}.param_groups[{i}].params"
            self.lines.append((at, f"list of {len(group['params'])}"))
            for j, parameter in enumerate(group["params"]):
                if _is_dtensor(parameter):
                    raise UnsupportedError("the state of a DTensor lies on many ranks", name=f"{at}[{j}]")
                self.lines.append((f"{at}[{j}]", f"parameter {_text(parameter)}"))
        self.keepers[path] = optimizer


def _module_content(module: Any, *, written: bool, buffers: bool = True) -> _Content:
    if not isinstance(module, nn.Module):
        raise InvalidArgumentError(f"a module is wanted, not {type(module).__name__}")
    content = _Content(written=written)
    content.add_module("", module, buffers=buffers)
    return content


def _is_leaf(value: Any) -> bool:
    return isinstance(value, nn.Module | enum.Enum) or _is_optimizer(value) or _keeps_state(value)


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, torch.optim.Optimizer) or (hasattr(value, "param_groups") and hasattr(value, "state"))


def _keeps_state(value: Any) -> bool:
    """Whether `value` is an object whose state can be taken and given, as LR schedulers are."""
    verbs = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, type) and all(callable(verb) for verb in verbs)


def _is_number(value: Any) -> bool:
    if isinstance(value, np.generic):
        return value.dtype.kind in "biufc" and not isinstance(value, np.longdouble | np.clongdouble)
    return type(value) in (bool, int, float, complex)


def _kind(value: Any) -> str | None:
    """The kind of a plain value, which root's must have too; None for what is no plain value."""
    if value is None:
        return "None"
    if _is_number(value):
        return "number"
    if isinstance(value, enum.Enum):
        return f"enum {type(value).__qualname__}" if _has_text(value) else None
    return {str: "str", torch.dtype: "dtype"}.get(type(value))


def _has_text(value: Any) -> bool:
    try:
        values.encode(value)
    except (TypeError, ValueError):
        return False
    return True


# Memory


def _is_dtensor(tensor: Any) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def _memory_of(given: Any, path: str, *, written: bool) -> Memory:
    """The dense memory of a tensor or array; what has none, or cannot be written, is an error naming `path`."""
    if isinstance(given, np.ndarray):
        return _array_memory(given, path, written=written)
    if nn.parameter.is_lazy(given):
        raise InvalidArgumentError("this parameter has no shape yet: run the module once on every rank", name=path)
    if _is_dtensor(given):
        given = _replicated(given, path)
    _check_dense(given, path)
    if written:
        _check_writable(given, path)
    return given.detach()


def _array_memory(array: np.ndarray[Any, Any], path: str, *, written: bool) -> Memory:
    if array.dtype.hasobject or isinstance(array, np.ma.MaskedArray):
        kind = "a masked array" if isinstance(array, np.ma.MaskedArray) else "an array of objects"
        raise UnsupportedError(f"{kind} cannot be synchronized", name=path)
    if written and not array.flags.writeable:
        raise InvalidArgumentError("this array is read-only, and is to be filled", name=path)
    return np.asarray(array)


def _replicated(tensor: Any, path: str) -> torch.Tensor:
    """The whole of a DTensor that every rank of its mesh has."""
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise UnsupportedError(
            f"a DTensor placed as {list(tensor.placements)} has other parts on other ranks: save_checkpoint and "
            "load_checkpoint move such, and to_local() is this rank's part",
            name=path,
        )
    local: torch.Tensor = tensor.detach().to_local()
    return local


def _check_dense(tensor: torch.Tensor, path: str) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)[6:]
        raise UnsupportedError(f"only dense tensors can be synchronized, not a {kind} one", name=path)
    if tensor.numel() and not tensor.data_ptr():
        raise UnsupportedError(f"this {type(tensor).__name__} has no storage of its own, or it was freed", name=path)


def _check_writable(tensor: torch.Tensor, path: str) -> None:
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise UnsupportedError("an inference tensor cannot be changed outside torch.inference_mode()", name=path)
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InvalidArgumentError("several elements lie in one place of memory: clone() it first", name=path)


def _place_of(memory: Memory) -> tuple[Any, ...] | None:
    """A key that tied tensors share: the same memory seen in the same way. None where nothing is there to share."""
    if not memory.nbytes:
        return None
    if isinstance(memory, np.ndarray):
        return (memory.__array_interface__["data"][0], memory.shape, memory.strides, memory.dtype)
    seen_as = (memory.dtype, memory.is_conj(), memory.is_neg())
    return (memory.data_ptr(), memory.device, memory.shape, memory.stride(), *seen_as)


def _device_type(memory: Memory) -> str:
    return "cpu" if isinstance(memory, np.ndarray) else memory.device.type


def _text(memory: Memory) -> str:
    """Kind, dtype, shape and device in words."""
    if isinstance(memory, np.ndarray):
        return f"array {memory.dtype}{list(memory.shape)}"
    where = "" if memory.device.type == "cpu" else f" on {memory.device.type}"
    return f"{str(memory.dtype)[6:]}{list(memory.shape)}{where}"


# The comparison


def _compare(comm: Communicator, root: int, describe: Callable[..., _Content]) -> tuple[_Content, Any]:
    """What this rank holds, once all ranks are known to hold the same, and root's letter. Collective."""
    content, note = _Content(written=False), None
    failure: Exception | None = None
    try:
        comm.check_root(root)
        content = describe(written=comm.rank != root)
        note = [root, content.digest, content.kinds, _letter(content) if comm.rank == root else None]
    except Exception as error:  # noqa: BLE001 (it is raised on all ranks)
        failure = error
    notes = comm.agree(failure, phase="looking at what it holds", note=note)
    roots = [note[0] for note in notes]
    if len(set(roots)) > 1:
        raise MismatchError(f"ranks name different roots: {', '.join(map(str, roots))}")
    wanted = notes[root]
    different = [rank for rank, (_, digest, kinds, _) in enumerate(notes) if not _agree(digest, kinds, *wanted[1:3])]
    if different:
        told = comm.broadcast_object(content.places() if comm.rank == root else None, root=root)
        failure = _difference(content.places(), told, comm.rank, root, different) if comm.rank in different else None
        comm.agree(failure, phase="comparing what ranks hold")
    return content, wanted[3]


def _agree(digest: str, kinds: Sequence[str | None], roots_digest: str, roots_kinds: Sequence[str | None]) -> bool:
    return digest == roots_digest and all(map(_alike, kinds, roots_kinds))


def _alike(kind: str | None, other: str | None) -> bool:
    """Whether values of these kinds may stand for each other."""
    return kind == other or "None" in (kind, other)


def _difference(
    ours: Sequence[Any], theirs: Sequence[Any], rank: int, root: int, different: Sequence[int]
) -> MismatchError:
    """The error that shows root's side and this rank's at the first path where they differ."""
    nothing = (None, "", None, "nothing")
    pairs = itertools.zip_longest(ours, theirs, fillvalue=nothing)
    own, told = next((own, told) for own, told in pairs if own[:2] != told[:2] or not _alike(own[2], told[2]))
    if own[0] != told[0]:  # the other side has nothing there
        only_ours = told is nothing or told[0] in {place[0] for place in ours}
        own, told = (own, nothing) if only_ours else (nothing, told)
    ranks = ", ".join(map(str, different[:_SHOWN])) + (", ..." if len(different) > _SHOWN else "")
    return MismatchError(
        f"not all ranks hold what root holds (rank {root}; different on: {ranks})",
        rank=rank,
        name=(own[0] if told is nothing else told[0]) or "(the whole)",
        expected=f"{told[3]} (rank {root})",
        found=f"{own[3]} (rank {rank})",
    )


# The letter: what root says in JSON


class _Writer:
    """A state in JSON text; what has no text is kept out and described by specs, tensors among it in `memories`."""

    def __init__(self, path: str) -> None:
        self.memories: list[Memory] = []
        self._specs: list[list[Any]] = []
        self._path = path
        self._kept: dict[int, tuple[str, Any]] = {}

    def write(self, state: Any) -> list[Any]:
        """The text, the specs and the names of the types that one must know to read it."""
        return [values.encode(state, self._keep), self._specs, list(values.types_of(state))]

    def _keep(self, value: Any, path: str) -> str | None:
        if id(value) not in self._kept:
            spec = self._spec(value, self._path + path)
            if spec is None:
                return None
            self._kept[id(value)] = (str(len(self._specs)), value)
            self._specs.append(spec)
        return self._kept[id(value)][0]

    def _spec(self, value: Any, path: str) -> list[Any] | None:
        if isinstance(value, torch.Tensor | np.ndarray):
            memory = _memory_of(value, path, written=False)
            self.memories.append(memory)
            if isinstance(memory, np.ndarray):
                return ["array", memory.dtype.str, list(memory.shape)]
            return ["tensor", str(memory.dtype)[6:], list(memory.shape), memory.device.type]
        if type(value) is complex or isinstance(value, np.generic):
            return _number_spec(value) if _is_number(value) else ["own"]
        return None if _kind(value) is not None or _has_parts(value) else ["own"]


def _number_spec(value: Any) -> list[Any]:
    plain = value if type(value) is complex else value.item()
    dtype = None if type(value) is complex else value.dtype.name
    return ["number", dtype, *((plain.real, plain.imag) if isinstance(plain, complex) else (plain, None))]


def _has_parts(value: Any) -> bool:
    if dataclasses.is_dataclass(value):
        return not isinstance(value, type)
    return isinstance(value, Mapping) or type(value) in (list, tuple) or hasattr(value, "_fields")


def _letter(content: _Content) -> Any:
    """Root's values and states; their tensors join what travels."""
    plain = _Writer("").write(content.values)
    states = {}
    for path, keeper in content.keepers.items():
        writer = _Writer(path)
        states[path] = writer.write(_state_of(keeper, path))
        content.memories.update({f"{path}#{i}": memory for i, memory in enumerate(writer.memories)})
    return [plain, states]


def _state_of(keeper: Any, path: str) -> Any:
    """The state of an optimizer, by the numbers of its parameters, or of an object that has a `state_dict`."""
    if not _is_optimizer(keeper):
        return keeper.state_dict()
    numbers: dict[Any, int] = {parameter: i for i, parameter in enumerate(_parameters(keeper))}
    state: dict[int, Any] = {}
    shared: dict[Any, Any] = {}
    for key, held in keeper.state.items():
        if not isinstance(key, torch.Tensor):
            shared[key] = held
        elif key in numbers:
            state[numbers[key]] = held
        else:
            raise InvalidArgumentError("there is state of a tensor that is in no param group", name=path)
    return {"param_groups": [_without_params(group) for group in keeper.param_groups], "state": state, "shared": shared}


def _parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


class _Told:
    """A place in root's text for what has none: its spec has this number."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Reader:
    """Root's text on a rank that holds `own`; `fill` puts in what has no text, and `memories` are to be filled."""

    def __init__(self, letter: Sequence[Any], own: Any, path: str, device: torch.device) -> None:
        text, self._specs, types = letter
        self._path = path
        self._device = device
        self._rooms: dict[int, Memory] = {}
        self._reused: set[tuple[Any, ...] | None] = {None}
        self.told = values.decode(text, types=values.types_of(own), leaf=self._leaf)
        unknown = set(types) - values.types_of(self.told).keys()
        if unknown:
            raise UnsupportedError(
                f"root holds a {min(unknown)}, which this rank does not know: give it to register_config", name=path
            )

    @property
    def memories(self) -> list[Memory]:
        """What is to be filled, in root's order."""
        rooms = [self._rooms[number] for number in sorted(self._rooms)]
        return [_memory_of(room, self._path, written=True) for room in rooms]

    def _leaf(self, name: str) -> Any:
        kind, *about = self._specs[int(name)]
        return _number(*about) if kind == "number" else _Told(int(name))

    def fill(self, told: Any, own: Any, like: torch.Tensor | None = None) -> Any:
        """`told` with tensors: those of `own` in the same places where they fit, else new ones, `like` a parameter."""
        held = dict(flatten(own))
        gaps = {path: leaf.number for path, leaf in flatten(told) if isinstance(leaf, _Told)}
        return rebuild(told, {path: self._filling(number, path, held, like) for path, number in gaps.items()})

    def _filling(self, number: int, path: str, held: Mapping[str, Any], like: torch.Tensor | None) -> Any:
        spec = self._specs[number]
        if spec[0] != "own":
            if number not in self._rooms:
                self._rooms[number] = self._room(spec, held.get(path), like)
            return self._rooms[number]
        if path not in held:
            raise UnsupportedError(f"root has an object at {path} that cannot be sent, this rank none", name=self._path)
        return held[path]

    def _room(self, spec: Sequence[Any], own: Any, like: torch.Tensor | None) -> Memory:
        """Memory for what `spec` describes: `own` if it fits and serves no other place already, else new."""
        near = self._device if like is None else like.device
        place = torch.device("cpu") if spec[3:] == ["cpu"] else near
        if _fits(own, spec, place) and (key := _place_of(own)) not in self._reused:
            self._reused.add(key)
            return own
        return _new(spec, like, place)


def _number(dtype: str | None, real: float, imag: float | None) -> Any:
    plain = real if imag is None else complex(real, imag)
    return plain if dtype is None else np.dtype(dtype).type(plain)


def _fits(own: Any, spec: Sequence[Any], place: torch.device) -> bool:
    kind, name, shape, *_ = spec
    if kind == "array":
        return isinstance(own, np.ndarray) and (own.dtype, list(own.shape)) == (np.dtype(name), shape)
    wanted = (getattr(torch, name), shape, place)
    return isinstance(own, torch.Tensor) and (own.dtype, list(own.shape), own.device) == wanted


def _new(spec: Sequence[Any], like: torch.Tensor | None, place: torch.device) -> Memory:
    """Memory for what `spec` describes, laid out like a parameter of that shape."""
    kind, name, shape, *_ = spec
    if kind == "array":
        return np.empty(shape, name)
    dtype = getattr(torch, name)
    if like is not None and (list(like.shape), like.device) == (shape, place):
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=place)


def _prepared(keeper: Any, own: Any, reader: _Reader) -> Callable[[], None]:
    """What gives `keeper`, whose state is `own`, root's once the reader's memories are filled."""
    told = reader.told
    if not _is_optimizer(keeper):
        return functools.partial(keeper.load_state_dict, reader.fill(told, own))
    parameters = _parameters(keeper)
    groups = [
        reader.fill(its, _without_params(group), next(iter(group["params"]), None))
        for its, group in zip(told["param_groups"], keeper.param_groups, strict=True)
    ]
    state = {
        parameters[i]: reader.fill(its, own["state"].get(i, {}), parameters[i]) for i, its in told["state"].items()
    }
    shared = {key: reader.fill(its, own["shared"].get(key, {})) for key, its in told["shared"].items()}
    return functools.partial(_set_optimizer, keeper, groups, {**state, **shared})


def _set_optimizer(optimizer: Any, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> None:
    """Give an optimizer a state; its groups and each parameter's state stay the same dicts, which others may hold."""
    for group, new in zip(optimizer.param_groups, groups, strict=True):
        parameters = group["params"]
        group.clear()
        group.update(params=parameters, **new)
    held = dict(optimizer.state)
    optimizer.state.clear()
    for key, new in state.items():
        own = held.get(key)
        if isinstance(own, dict) and isinstance(new, dict):
            own.clear()
            own.update(new)
        optimizer.state[key] = own if isinstance(own, dict) and isinstance(new, dict) else new


# The travel


def _fill(comm: Communicator, root: int, describe: Callable[..., _Content]) -> dict[str, Any]:
    """Give this rank root's tensors and states; returns the values that differ here, by path. Collective."""
    content, letter = _compare(comm, root, describe)
    memories = list(content.memories.values())
    taken: dict[str, Any] = {}
    deeds: list[Callable[[], None]] = []
    with comm.phase("reading what root says"):
        if comm.rank != root:
            taken, deeds = _read(letter, content, comm.device, memories)
    _broadcast(comm, memories, root)
    for deed in deeds:
        deed()
    return taken


def _read(
    letter: Any, content: _Content, device: torch.device, memories: list[Memory]
) -> tuple[dict[str, Any], list[Callable[[], None]]]:
    """Root's values where they are others, and what is to be done once `memories`, which grow, are filled."""
    plain, states = letter
    told = _Reader(plain, content.values, "", device).told
    deeds = []
    for path, keeper in content.keepers.items():
        own = _state_of(keeper, path)
        reader = _Reader(states[path], own, path, device)
        deeds.append(_prepared(keeper, own, reader))
        memories += reader.memories
    return {path: value for path, value in told.items() if not _same(value, content.values[path])}, deeds


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and value == other


def _broadcast(comm: Communicator, memories: Sequence[Memory], root: int) -> None:
    """Root's bytes in every rank's memories. Collective; all ranks give the same shapes, dtypes and kinds of device."""
    if comm.world_size == 1:
        return
    for window in _windows(memories):
        run = _one_run(window[0]) if len(window) == 1 else None
        if run is not None:
            comm.broadcast(run, root=root)
            continue
        parts, flat = _laid_flat(window)
        if comm.rank == root:
            for piece, part in zip(window, parts, strict=True):
                _copy(piece, part, back=False)
        comm.broadcast(flat, root=root)
        if comm.rank != root:
            for piece, part in zip(window, parts, strict=True):
                _copy(piece, part, back=True)


def _windows(memories: Sequence[Memory]) -> Iterator[list[Memory]]:
    """What travels together, cut by shapes and dtypes alone, since ranks must cut alike and strides may differ."""
    for kind in sorted({_device_type(memory) for memory in memories}):
        window: list[Memory] = []
        nbytes = 0
        for piece in itertools.chain.from_iterable(_pieces(m) for m in memories if _device_type(m) == kind):
            if piece.nbytes >= _ALONE_BYTES:
                yield [piece]
                continue
            if nbytes + piece.nbytes > _WINDOW_BYTES:
                yield window
                window, nbytes = [], 0
            window.append(piece)
            nbytes += _aligned(piece.nbytes)
        if window:
            yield window


def _pieces(memory: Memory) -> Iterator[Memory]:
    """A memory in pieces of at most a window, cut along its first dimensions; none of an empty one."""
    rows = len(memory) * _WINDOW_BYTES // memory.nbytes if memory.nbytes > _WINDOW_BYTES else 0
    if rows:
        yield from (memory[first : first + rows] for first in range(0, len(memory), rows))
    elif memory.nbytes > _WINDOW_BYTES:
        for row in memory:
            yield from _pieces(row)
    elif memory.nbytes:
        yield memory


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _one_run(piece: Memory) -> torch.Tensor | None:
    """The bytes of `piece` where they lie, if they do so in one run and in order."""
    if isinstance(piece, np.ndarray):
        in_order = piece.flags.c_contiguous and piece.flags.writeable
        return torch.from_numpy(piece.reshape(-1).view(np.uint8)) if in_order else None
    if not piece.is_contiguous() or piece.is_conj() or piece.is_neg():
        return None
    flat = piece.view(-1)
    # A single element counts as contiguous whatever its stride.
    return flat.view(torch.uint8) if flat.stride(0) == 1 else None


def _laid_flat(window: Sequence[Memory]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Room for each piece of a window in one run of bytes, and that run."""
    ends = list(itertools.accumulate(_aligned(piece.nbytes) for piece in window))
    begins = [0, *ends[:-1]]
    device = "cpu" if isinstance(window[0], np.ndarray) else window[0].device
    flat = torch.empty(begins[-1] + window[-1].nbytes, dtype=torch.uint8, device=device)
    return [flat[begin : begin + piece.nbytes] for begin, piece in zip(begins, window, strict=True)], flat


def _copy(piece: Memory, part: torch.Tensor, *, back: bool) -> None:
    """Copy `piece` into the bytes `part`, or back."""
    if isinstance(piece, np.ndarray):
        array = part.numpy().view(piece.dtype).reshape(piece.shape)
        np.copyto(*((piece, array) if back else (array, piece)))
        return
    run = _one_run(piece)
    mine, theirs = (run, part) if run is not None else (piece, part.view(piece.dtype).view(piece.shape))
    if back:
        mine.copy_(theirs)
    else:
        theirs.copy_(mine)
