"""The options of export, merge and load: checked once, and applied."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from statexchange.errors import InvalidArgumentError, did_you_mean, excerpt
from statexchange.settings import check_flags, check_progress, check_timeout
from statexchange.sharding.rules import Layout, with_dots
from statexchange.tensors import DTYPE_NAMES, LONG_NAMES

if TYPE_CHECKING:
    from statexchange.tensors import DType

__all__ = [
    "ADAPTER_PATTERN",
    "FLOATS",
    "MODEL_PATTERN",
    "REPLICAS",
    "Cast",
    "ExportOptions",
    "LoadOptions",
    "Rename",
    "Replicas",
    "WriteOptions",
    "mesh_option",
    "rename_rules",
    "renamed",
]

Rename = Callable[[str], str] | Sequence[tuple[str, str]]
Replicas = Literal["equal", "root"]
Cast: TypeAlias = "DType | Mapping[str, DType]"  # one for all tensors, or by patterns of names

REPLICAS: tuple[str, ...] = ("equal", "root")
MODEL_PATTERN = "model{suffix}.safetensors"
ADAPTER_PATTERN = "adapter_model{suffix}.safetensors"  # of an adapter of PEFT
FLOATS = ("F16", "BF16", "F32", "F64")
_CAST_DTYPES = tuple(LONG_NAMES[name] for name in FLOATS)
_FILENAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\{suffix\}[A-Za-z0-9._-]{0,80}\.safetensors")
_EVERY_NAME = "*"
_BRACKETS = re.compile(r"\[\[\]([^\[\]]*)\]")
_MAX_COMPARED = 1 << 16  # characters of an option that ranks compare
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:([KMGT])(i?))?B?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The options by which tensors are selected, named, converted and assigned to files.

    Accepts the arguments of `export_checkpoint` and `merge_checkpoint` and normalises them: patterns and pairs become
    tuples, `dtype` a safetensors name, `max_shard_size` bytes, and `layout` is parsed.

    Args:
        include: shell patterns of names in the source; by default all are selected.
        exclude: shell patterns of names to leave out.
        rename: a function of a name, or (regex, replacement) pairs, which are applied in order.
        replicas: "equal": copies of a box must be equal; "root": the lowest rank's copy is taken.
        dtype: write floating tensors in this floating dtype, torch's or its name; or a mapping of shell patterns of
            names in the source to dtypes, of which the first that matches counts; None: keep each tensor's dtype.
        max_shard_size: a new file begins before a tensor that would make it larger: bytes, or text like "5GB".
        filename_pattern: names of the files, with ``{suffix}`` for their numbers; None: those of a model.
        layout: rules for plain tensors (`statexchange.sharding.rules`).

    Raises:
        InvalidArgumentError: a value is not accepted; the message names the option.
    """

    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    rename: Rename = ()
    replicas: Replicas = "equal"
    dtype: Any = None
    max_shard_size: int | str = "5GB"
    filename_pattern: str | None = None
    layout: Any = None

    def __post_init__(self) -> None:
        accepted = {
            "include": _name_patterns("include", self.include),
            "exclude": _name_patterns("exclude", self.exclude),
            "rename": rename_rules(self.rename),
            "dtype": _cast_rules(self.dtype),
            "max_shard_size": _parse_size(self.max_shard_size),
            "layout": self.layout if isinstance(self.layout, Layout | None) else Layout.parse(self.layout),
        }
        _check_replicas_option(self.replicas)
        if self.filename_pattern is not None and not (
            isinstance(self.filename_pattern, str) and _FILENAME_PATTERN.fullmatch(self.filename_pattern)
        ):
            raise InvalidArgumentError(
                f"filename_pattern must be like 'model{{suffix}}.safetensors', not {excerpt(self.filename_pattern)}"
            )
        for option, value in accepted.items():
            object.__setattr__(self, option, value)

    @property
    def max_shard_bytes(self) -> int:
        """`max_shard_size` in bytes."""
        return int(self.max_shard_size)

    def wants(self, name: str) -> bool:
        """Whether a name in the source is selected."""
        included = not self.include or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.include)
        return included and not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exclude)

    def check_include(self, names: Collection[str]) -> None:
        """Raise InvalidArgumentError if the patterns select nothing of these names, or one matches none of them."""
        for pattern in self.include:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                text = f"include pattern {pattern!r} matches no tensor{did_you_mean(pattern, names)}"
                raise InvalidArgumentError(text)
        if names and not any(map(self.wants, names)):
            raise InvalidArgumentError(f"exclude patterns {list(self.exclude)} leave no tensor")

    def notes_on_exclude(self, names: Iterable[str]) -> list[str]:
        """Return a note for each exclude pattern that matches none of these names."""
        notes = []
        for pattern in self.exclude:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                notes.append(f"exclude pattern {pattern!r} matches no tensor{did_you_mean(pattern, names)}")
        return notes

    def notes_on_rename(self, names: Iterable[str]) -> list[str]:
        """Return a note for each rename pattern that matches none of these names, after the renames before it."""
        notes = []
        for pattern, replacement in () if callable(self.rename) else self.rename:
            if not any(re.search(pattern, name) for name in names):
                notes.append(f"rename pattern {pattern!r} matches no tensor{did_you_mean(pattern, names)}")
            names = {renamed(name, [(pattern, replacement)]) for name in names}
        return notes

    def renamed(self, name: str) -> str:
        """Return the name under which a tensor is written."""
        return renamed(name, self.rename)

    def output_dtype(self, name: str, dtype: str) -> str:
        """Return the dtype in which tensor `name` of `dtype` is written; only floating dtypes are cast."""
        if dtype in FLOATS:
            for pattern, wanted in self.dtype:
                if fnmatch.fnmatchcase(name, pattern):
                    return str(wanted)
        return dtype

    def casts(self, name: str) -> bool:
        """Whether a pattern of `dtype` matches the name of a tensor in the source."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern, _ in self.dtype)

    def new_layout(self) -> Layout:
        """Return a new copy of the layout, in which no pattern has matched a name yet."""
        return Layout({}) if self.layout is None else self.layout.unmatched()

    def texts(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, as text by name.

        Rules of a layout may differ, as they may have each rank's own boxes. Functions cannot be compared.
        """
        return {
            "include": excerpt(self.include, _MAX_COMPARED),
            "exclude": excerpt(self.exclude, _MAX_COMPARED),
            "rename": "a function" if callable(self.rename) else excerpt(self.rename, _MAX_COMPARED),
            "replicas": repr(self.replicas),
            "dtype": _cast_text(self.dtype),
            "max_shard_size": repr(self.max_shard_size),
            "filename_pattern": repr(self.filename_pattern),
            **mesh_option(self.layout),
        }


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How an export or save is written, whatever it holds: the arguments of these names.

    Raises:
        InvalidArgumentError: a value is not accepted; the message names the option.
    """

    overwrite: bool = False
    background: bool = False
    stall_timeout_s: float = 300.0
    on_progress: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        check_flags(background=self.background, overwrite=self.overwrite)
        check_timeout(self.stall_timeout_s, "stall_timeout_s")
        check_progress(self.on_progress)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options by which a checkpoint's tensors are matched with live state.

    Args:
        strict: names that are missing or unexpected are an error.
        layout: rules for plain tensors of the state (`statexchange.sharding.rules`).
        include: shell patterns of names in the state, or of what contains them; by default all are loaded.
        exclude: shell patterns, in the same form, of what is not loaded.
        rename: from the source's names to the state's: a function, or (regex, replacement) pairs.
        dtype: None: dtypes must be equal; "state": floating values are cast to the dtype that the state has.
        replicas: "equal": several ranks' copies of a region must be equal, unless each rank loads its own; "root": the
            lowest rank's copy is taken.

    Raises:
        InvalidArgumentError: a value is not accepted; the message names the option.
    """

    strict: bool = True
    layout: Any = None
    include: str | Sequence[str] = ()
    exclude: str | Sequence[str] = ()
    rename: Rename = ()
    dtype: str | None = None
    replicas: Replicas = "equal"

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype != "state":
            raise InvalidArgumentError(
                f'dtype must be None or "state", which casts to the dtype that the state has, not {excerpt(self.dtype)}'
            )
        _check_replicas_option(self.replicas)
        check_flags(strict=self.strict)
        accepted = {
            "layout": self.layout if isinstance(self.layout, Layout | None) else Layout.parse(self.layout),
            "include": _name_patterns("include", self.include),
            "exclude": _name_patterns("exclude", self.exclude),
            "rename": rename_rules(self.rename),
        }
        for option, value in accepted.items():
            object.__setattr__(self, option, value)

    def wants(self, name: str) -> bool:
        """Whether the state's tensor or value with this name is loaded."""
        return self._includes(name) and not self._excludes(name)

    def wants_object(self, names: Sequence[str]) -> bool:
        """Whether an object whose state has these names is loaded: if one is included and none is excluded."""
        return any(map(self._includes, names)) and not any(map(self._excludes, names))

    def _includes(self, name: str) -> bool:
        return not self.include or _matches(self.include, name)

    def _excludes(self, name: str) -> bool:
        return bool(self.exclude) and _matches(self.exclude, name)

    def may_want(self, path: str) -> bool:
        """Whether anything below `path` may be loaded."""
        if not self.include and not self.exclude:
            return True
        begin = f"{with_dots(path)}."
        if self._excludes(path) or self._excludes(begin):
            return False
        heads = [re.split(r"[*?[]", pattern, maxsplit=1)[0] for pattern in self.include]
        return not heads or any(head.startswith(begin) or begin.startswith(head) for head in heads)

    def casts(self, stored: str, live: str) -> bool:
        """Whether values of dtype `stored` are cast to `live`."""
        return self.dtype == "state" and stored in FLOATS and live in FLOATS

    def texts(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks, as text by name; pipeline stages may load other names."""
        return {
            "strict": repr(bool(self.strict)),
            "dtype": repr(self.dtype),
            "replicas": repr(self.replicas),
            **mesh_option(self.layout),
        }


def _matches(patterns: Sequence[str], name: str) -> bool:
    """Whether a pattern matches a path, or that of something that contains it. A list's index is a part, as "a.0"."""
    fits = _regex(tuple(patterns)).fullmatch
    return fits(name) is not None or ("[" in name and fits(with_dots(name)) is not None)


@functools.lru_cache(maxsize=16)
def _regex(patterns: tuple[str, ...]) -> re.Pattern[str]:
    # The end lets "model" match "model.a" and "model[0]". A path as messages show it, "a[0]", is a pattern for itself,
    # and not for "a0" alone.
    texts = [fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z") for pattern in patterns]
    texts += [re.escape(with_dots(pattern)) for pattern in patterns if "[" in pattern]
    # "a[[]0]" is how a pattern says "a[0]".
    dotted = [_BRACKETS.sub(r".\1", pattern) for pattern in patterns if "[[]" in pattern]
    texts += [fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z") for pattern in dotted]
    return re.compile("|".join(rf"{text}(?s:[.\[].*)?" for text in texts))


def mesh_option(layout: Layout | None) -> dict[str, str]:
    """Return the part of a layout that must be equal on all ranks, as text by name."""
    return {"layout's mesh": excerpt({} if layout is None else dict(layout.mesh), _MAX_COMPARED)}


def _name_patterns(option: str, value: object) -> tuple[str, ...]:
    """Return one shell pattern or several as a tuple; raise InvalidArgumentError for anything else."""
    patterns: tuple[Any, ...] | None = None
    if isinstance(value, str):
        patterns = (value,)
    elif isinstance(value, Iterable):
        patterns = tuple(value)
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise InvalidArgumentError(f"{option} must be a pattern or several, not {excerpt(value)}")
    return patterns


def rename_rules(value: object) -> Rename:
    """Return a `rename` as a function or a tuple of pairs; raise InvalidArgumentError for anything else."""
    if callable(value):
        function: Callable[[str], str] = value
        return function
    pairs: tuple[Any, ...] = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(map(_is_pair, pairs)):
        text = f"rename must be a function or a list of (regex, replacement) pairs, not {excerpt(value)}"
        raise InvalidArgumentError(text)
    for pattern, _ in pairs:
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidArgumentError(f"rename pattern {excerpt(pattern)}: {error}") from None
    return tuple((pattern, replacement) for pattern, replacement in pairs)


def _is_pair(value: object) -> bool:
    """Whether this is a (regex, replacement) pair."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)


def renamed(name: str, rename: Rename) -> str:
    """Return the new name of a tensor."""
    if callable(rename):
        try:
            new = rename(name)
        except Exception as error:
            raise InvalidArgumentError(f"rename raised {excerpt(error, 200)}", name=name) from error
        if not isinstance(new, str):
            raise InvalidArgumentError(f"rename must return a name, not {excerpt(new)}", name=name)
        return new
    for pattern, replacement in rename:
        try:
            name = re.sub(pattern, replacement, name)
        except (re.error, IndexError) as error:  # the replacement refers to a missing group
            text = f"rename replacement {excerpt(replacement)} of pattern {excerpt(pattern)}: {error}"
            raise InvalidArgumentError(text, name=name) from None
    return name


def _check_replicas_option(replicas: object) -> None:
    """Raise InvalidArgumentError unless `replicas` is a value that the option accepts."""
    if replicas not in REPLICAS:
        raise InvalidArgumentError(f"replicas must be 'equal' or 'root', not {excerpt(replicas)}")


def _cast_rules(dtype: object) -> tuple[tuple[str, str], ...]:
    """Return a `dtype` option as (pattern, safetensors name of a floating dtype) pairs."""
    if dtype is None:
        return ()
    if isinstance(dtype, tuple) and all(_is_pair(rule) and rule[1] in FLOATS for rule in dtype):
        return dtype  # a copy of `ExportOptions` has the checked options
    if not isinstance(dtype, Mapping):
        return ((_EVERY_NAME, _float_name(dtype)),)
    if not all(isinstance(pattern, str) for pattern in dtype):
        raise InvalidArgumentError(f"dtype must be a dtype, or a mapping of patterns to dtypes, not {excerpt(dtype)}")
    return tuple((pattern, _float_name(wanted)) for pattern, wanted in dtype.items())


def _cast_text(rules: Sequence[tuple[str, str]]) -> str:
    """Return cast rules as the user may have given them."""
    named = {pattern: LONG_NAMES[wanted] for pattern, wanted in rules}
    if named.keys() <= {_EVERY_NAME}:
        return repr(named.get(_EVERY_NAME))
    return excerpt(named, _MAX_COMPARED)


def _float_name(dtype: object) -> str:
    """Return the safetensors name of a floating dtype, given by any of its names or as torch's."""
    text = str(dtype).removeprefix("torch.").lower()
    name = DTYPE_NAMES.get(text, text.upper())
    if name not in FLOATS:
        raise InvalidArgumentError(f"dtype must be one of {', '.join(_CAST_DTYPES)}, not {excerpt(dtype)}")
    return name


def _parse_size(size: object) -> int:
    """Return a size in bytes, given as int, or as text with KB, MB, GB, TB (powers of 1000) or KiB ... (of 1024)."""
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        number, unit, binary = match.groups()
        base = 1024 if binary else 1000
        exponent = "KMGT".index(unit.upper()) + 1 if unit else 0
        size = int(Fraction(number) * base**exponent)
    if type(size) is not int:
        raise InvalidArgumentError(f"max_shard_size: {excerpt(size)} is not a size like '5GB', '512MiB' or 2_000_000")
    if size <= 0:
        raise InvalidArgumentError(f"max_shard_size must be positive, not {size}")
    return size
