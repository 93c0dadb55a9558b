"""The options of merge, export, save, load and diff: one record, whose fields say how each is checked and shown.

A public call makes its records from its arguments, `ExportOptions.of(locals())`. Its parameters and the fields have the
same names, so that an option is named in two places: in its field here, and in the signatures of the calls that have
it. Commands make their options from the fields, too (cli/commands.py).
"""

from __future__ import annotations

import fnmatch
import functools
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

from statexchange.errors import InvalidArgumentError, did_you_mean, excerpt
from statexchange.settings import check_flags, check_timeout
from statexchange.sharding.rules import Layout, with_dots
from statexchange.tensors import DTYPE_NAMES, LONG_NAMES

if TYPE_CHECKING:
    from typing_extensions import Self

    from statexchange.tensors import DType

T = TypeVar("T")
Rename: TypeAlias = Callable[[str], str] | Sequence[tuple[str, str]]
Replicas = Literal["equal", "root"]
REPLICAS: tuple[Replicas, ...] = get_args(Replicas)
Readers = Literal["host", "job"]
Cast: TypeAlias = "DType | Mapping[str, DType]"  # one for all tensors, or by patterns of names
Convert: TypeAlias = str | Mapping[str, Any]
FilesFrom: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Mapping[str, str | bytes] | None

MODEL_PATTERN = "model{suffix}.safetensors"
ADAPTER_PATTERN = "adapter_model{suffix}.safetensors"  # of an adapter of PEFT
FLOATS = ("F16", "BF16", "F32", "F64")
_CAST_DTYPES = tuple(LONG_NAMES[name] for name in FLOATS)
_FILENAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}\{suffix\}[A-Za-z0-9._-]{0,80}\.safetensors")
_EVERY_NAME = "*"
_BRACKETS = re.compile(r"\[\[\]([^\[\]]*)\]")
_MAX_COMPARED = 1 << 16  # characters of an option that ranks compare
_MAX_SHOWN = 300  # characters of such an option in a message
# "5GB", "1.5 TiB", "2000000"; numbers without a limit would take quadratic time to convert.
_SIZE = re.compile(r"\s*([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:([KMGT])(i?))?B?\s*", re.IGNORECASE)


def _name_patterns(option: str, value: object) -> tuple[str, ...]:
    """Return one shell pattern or several as a tuple; raise InvalidArgumentError for anything else."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Iterable):
        # Once and for all: an iterator of patterns is used up by its first reader.
        patterns = tuple(value)
        if all(isinstance(pattern, str) for pattern in patterns):
            return patterns
    raise InvalidArgumentError(f"{option} must be a pattern or several, not {excerpt(value)}")


def _rename_rules(_option: str, value: object) -> Rename:
    """Return a `rename` as a function or a tuple of pairs; raise InvalidArgumentError for anything else."""
    if callable(value):
        return value
    pairs = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(map(_is_pair, pairs)):
        text = f"rename must be a function or a list of (regex, replacement) pairs, not {excerpt(value)}"
        raise InvalidArgumentError(text)
    for pattern, _ in pairs:
        # Now, and not at the first name: by then a rank may wait for others that have no such name.
        try:
            re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise InvalidArgumentError(f"rename pattern {excerpt(pattern)}: {error}") from None
    # Lists, which a caller could change later, become tuples, too.
    return tuple(map(tuple, pairs))


def _is_pair(value: object) -> bool:
    """Whether this is a (regex, replacement) pair."""
    return isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(part, str) for part in value)


def _parsed_layout(_option: str, value: object) -> Layout | None:
    if isinstance(value, Layout | None):
        return value
    return Layout.parse(value)


def _choice(option: str, value: object, *, choices: Sequence[object]) -> object:
    if value not in choices:
        *texts, last = map(repr, choices)
        raise InvalidArgumentError(f"{option} must be {', '.join(texts)} or {last}, not {excerpt(value)}")
    return value


def _cast_rules(_option: str, dtype: object) -> tuple[tuple[str, str], ...]:
    """Return a `dtype` option as (pattern, safetensors name of a floating dtype) pairs."""
    if dtype is None:
        return ()
    if isinstance(dtype, tuple) and all(_is_pair(rule) and rule[1] in FLOATS for rule in dtype):
        # A copy of a record has the checked options, which are checked again.
        return dtype
    if not isinstance(dtype, Mapping):
        return ((_EVERY_NAME, _float_name(dtype)),)
    rules = []
    for pattern, wanted in dtype.items():
        if not isinstance(pattern, str):
            text = f"dtype must be a dtype, or a mapping of patterns to dtypes, not {excerpt(dtype)}"
            raise InvalidArgumentError(text)
        rules.append((pattern, _float_name(wanted)))
    return tuple(rules)


def _float_name(dtype: object) -> str:
    """Return the safetensors name of a floating dtype, given by any of its names or as torch's."""
    # By its text: this module does not import torch.
    text = str(dtype).removeprefix("torch.").lower()
    name = DTYPE_NAMES.get(text, text.upper())
    if name not in FLOATS:
        raise InvalidArgumentError(f"dtype must be one of {', '.join(_CAST_DTYPES)}, not {excerpt(dtype)}")
    return name


def _state_dtype(_option: str, value: object) -> object:
    if value is not None and value != "state":
        raise InvalidArgumentError(
            f'dtype must be None or "state", which casts to the dtype that the state has, not {excerpt(value)}'
        )
    return value


def _num_bytes(option: str, size: object) -> int:
    """Return a size in bytes, given as int, or as text with KB, MB, GB, TB (powers of 1000) or KiB ... (of 1024)."""
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        number, unit, binary = match.groups()
        base = 1024 if binary else 1000
        exponent = "KMGT".index(unit.upper()) + 1 if unit else 0
        # By integers: a float makes 4.7TB a few bytes less, and ranks of other platforms might round in another way.
        whole, _, decimals = number.partition(".")
        size = int(whole + decimals) * base**exponent // 10 ** len(decimals)
    # Not isinstance: True is an int.
    if type(size) is not int:
        raise InvalidArgumentError(f"{option}: {excerpt(size)} is not a size like '5GB', '512MiB' or 2_000_000")
    if size <= 0:
        raise InvalidArgumentError(f"{option} must be positive, not {size}")
    return size


def _file_names(option: str, value: object) -> object:
    if value is not None and not (isinstance(value, str) and _FILENAME_PATTERN.fullmatch(value)):
        raise InvalidArgumentError(f"{option} must be like 'model{{suffix}}.safetensors', not {excerpt(value)}")
    return value


def _flag(option: str, value: object) -> object:
    check_flags(**{option: value})
    return value


def _from_zero(option: str, value: float | None, kind: type = Real) -> object:
    if value is not None and not (isinstance(value, kind) and value >= 0):
        raise InvalidArgumentError(f"{option} must be a number from 0 on, not {excerpt(value)}")
    return value


def whole_number(value: object, name: str, *, least: int = 0) -> int:
    """Return a whole number of at least `least`; raise InvalidArgumentError for anything else."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgumentError(f"{name} must be a whole number, not {excerpt(value)}") from None
    if number < least:
        raise InvalidArgumentError(f"{name} must be at least {least}, not {number}")
    return number


def _timeout(option: str, value: object) -> float:
    return check_timeout(value, option)


def _progress(option: str, value: object) -> object:
    if value is not None and not callable(value):
        raise InvalidArgumentError(f"{option} must be a function of two numbers, not {excerpt(value)}")
    return value


def _text(value: object) -> str:
    """Return an option as ranks compare it. Functions cannot be compared."""
    if callable(value):
        return "a function"
    return excerpt(value, _MAX_COMPARED)


def _cast_text(rules: Sequence[tuple[str, str]]) -> str:
    """Return cast rules as the user may have given them."""
    named = {pattern: LONG_NAMES[wanted] for pattern, wanted in rules}
    return _text(named.get(_EVERY_NAME) if named.keys() <= {_EVERY_NAME} else named)


def _option(
    default: T,
    check: Callable[..., object] | None = None,
    text: Callable[..., str] | None = None,
    **shown: object,
) -> T:
    """Return the field of an option.

    Args:
        default: what the option is unless it is given, in all calls and commands.
        check: returns the checked and normalised value, given the option's name and value.
        text: returns the value as ranks compare it; None: ranks may differ, or compare it elsewhere.
        shown: how a command shows the option, as click's keyword arguments.
    """
    # Checked once: calls have many options, and most are not given.
    normal: object = default
    if check is not None:
        normal = check("", default)
    return field(default=default, metadata={"check": check, "normal": normal, "text": text, "shown": shown})


@dataclass(frozen=True, slots=True)
class Options:
    """A record of options, which are checked and normalised by their fields.

    Raises:
        InvalidArgumentError: a value is not accepted; the message names the option.
    """

    def __post_init__(self) -> None:
        for option in fields(self):
            check, value = option.metadata["check"], getattr(self, option.name)
            if check is None:
                continue
            normal = option.metadata["normal"] if value is option.default else check(option.name, value)
            # The record is frozen for all others: only what was checked is in it.
            object.__setattr__(self, option.name, normal)

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Return the record of a call's arguments; an option that the call does not have keeps its default.

        Example: ``LoadOptions.of({"state": ..., "strict": False})`` is ``LoadOptions(strict=False)``.
        """
        options = {}
        for option in fields(cls):
            if option.name in arguments:
                options[option.name] = arguments[option.name]
        return cls(**options)


@dataclass(frozen=True, slots=True)
class CallOptions(Options):
    """How a call goes, whatever its tensors are.

    Attributes:
        section: the section of a job's state that is read; None: the model, where it is known.
        tolerance: by how much equal values may differ; None: bits are compared.
        threads: threads that write or compare; None: one per core.
        overwrite: replace the target.
        resume: also use or remove what killed processes on other hosts have left.
        dry_run: write nothing.
        background: write in a thread.
        memory: also keep the newest save in the hosts' shared memory.
        stall_timeout_s: limit of the time in which no rank moves a byte.
        on_progress: called with (bytes done, bytes in total).
    """

    section: str | None = _option(
        None,
        help="Merge this section of a job's state, as info lists them. By default the model; all if patterns are "
        "given.",
    )
    tolerance: float | None = _option(
        None,
        _from_zero,
        metavar="X",
        help="Compare by value; a difference of at most X counts as none. [default: compare bits and dtypes]",
    )
    threads: int | None = _option(
        None,
        functools.partial(_from_zero, kind=int),
        metavar="N",
        help="Number of threads that write; by default one per core.",
    )
    overwrite: bool = _option(False, _flag, help="Replace the checkpoint at PATH.")
    resume: bool = _option(
        False, _flag, help="Reuse or remove files of interrupted merges on other hosts, which must have ended."
    )
    dry_run: bool = _option(False, _flag, help="Check everything and show what would be written.")
    background: bool = _option(False, _flag)
    memory: bool = _option(False, _flag)
    stall_timeout_s: float = _option(300.0, _timeout)
    on_progress: Callable[[int, int], None] | None = _option(None, _progress)


@dataclass(frozen=True, slots=True)
class Selection(Options):
    """The options by which tensors are selected, named and converted.

    Patterns and pairs become tuples, and `layout` is parsed.

    Attributes:
        layout: rules for plain tensors (`statexchange.sharding.rules`).
        include: shell patterns of names; by default all are selected.
        exclude: shell patterns of names to leave out.
        rename: a function of a name, or (regex, replacement) pairs, which are applied in order.
        convert: a conversion to the names and values of another model family.
        convert_with: numbers that the conversion needs, by name.
        replicas: "equal": copies of a box must be equal; "root": the lowest rank's copy is taken.
    """

    differing: ClassVar[tuple[str, ...]] = ()  # options that may differ between ranks

    layout: Any = _option(
        None,
        _parsed_layout,
        metavar="FILE.json",
        help="How plain tensors of per-rank files are sharded, by name pattern: see above.",
    )
    include: str | Sequence[str] = _option(
        (),
        _name_patterns,
        _text,
        metavar="GLOB",
        multiple=True,
        help="Merge only tensors whose name matches; repeatable.",
    )
    exclude: str | Sequence[str] = _option(
        (),
        _name_patterns,
        _text,
        metavar="GLOB",
        multiple=True,
        help="Leave out tensors whose name matches; repeatable.",
    )
    rename: Rename = _option(
        (),
        _rename_rules,
        _text,
        metavar="REGEX=REPL",
        multiple=True,
        help="Replace REGEX by REPL in tensor names; repeatable, applied in order.",
    )
    convert: Convert | None = _option(
        None,
        metavar="NAME|FILE.json",
        help="Write another model family's names and values: a built-in conversion such as torchtitan:llama3, or your "
        "own. inverse: before it converts in the other direction.",
    )
    convert_with: Mapping[str, int] | None = _option(
        None,
        metavar="NAME=NUMBER",
        multiple=True,
        help="A number that the conversion needs and no config.json has, such as n_heads=32; repeatable.",
    )
    replicas: Replicas = _option(
        "equal",
        functools.partial(_choice, choices=REPLICAS),
        _text,
        choices=REPLICAS,
        help="equal: copies must be equal; root: take the lowest rank's copy.",
    )

    @property
    def converts(self) -> bool:
        """Whether a conversion is named, or numbers for one."""
        return self.convert is not None or self.convert_with not in (None, {})

    def texts(self) -> dict[str, str]:
        """Return the options that must be equal on all ranks and are not at their defaults, as text by name.

        Rules of a layout may differ, as they may have each rank's own boxes.
        """
        texts, defaults = {}, type(self)()
        for option in fields(self):
            text = option.metadata["text"]
            # What cannot be compared as text, such as a conversion's file, is compared where it is read.
            if text is None or option.name in self.differing:
                continue
            value = getattr(self, option.name)
            # A callable is never compared: its class may define __eq__.
            if callable(value) or value != getattr(defaults, option.name):
                texts[option.name] = text(value)
        return {**texts, **mesh_option(self.layout)}


@dataclass(frozen=True, slots=True)
class ExportOptions(Selection):
    """The options of what `export_checkpoint` and `merge_checkpoint` write.

    Attributes:
        dtype: write floating tensors in this floating dtype, torch's or its name; or a mapping of shell patterns of
            names in the source to dtypes, of which the first that matches counts; None: keep each tensor's dtype.
            It becomes pairs of a pattern and a safetensors name.
        max_shard_size: a new file begins before a tensor that would make it larger: bytes, or text like "5GB".
        filename_pattern: names of the files, with ``{suffix}`` for their numbers; None: those of a model.
        files_from: the small files beside the tensors.
    """

    dtype: Any = _option(
        None,
        _cast_rules,
        _cast_text,
        metavar="[GLOB=]DTYPE",
        multiple=True,
        help="Write floating tensors in this dtype (bfloat16, float16, float32, float64), or those whose name "
        "matches; repeatable. Integers, float8 and its scales stay as they are.",
    )
    max_shard_size: int | str = _option("5GB", _num_bytes, _text, metavar="SIZE", help="Start a new file at this size.")
    filename_pattern: str | None = _option(
        None,
        _file_names,
        _text,
        metavar="NAME",
        help="Output file name; {suffix} becomes -00001-of-00004 where there are several files.  "
        "[default: model{suffix}.safetensors; for an adapter of PEFT, adapter_model{suffix}.safetensors]",
    )
    files_from: FilesFrom = _option(
        None,
        metavar="PATH",
        multiple=True,
        help="Extra files to copy (config, tokenizer), or a directory of them; repeatable.",
    )

    @property
    def max_shard_bytes(self) -> int:
        """`max_shard_size` in bytes."""
        return int(self.max_shard_size)

    def wants(self, name: str) -> bool:
        """Whether a name in the source is selected."""
        # In a loop: it is asked for each of 100,000 tensors, most often without a pattern.
        for pattern in self.exclude:
            if fnmatch.fnmatchcase(name, pattern):
                return False
        return not self.include or _any_match(self.include, [name])

    def check_include(self, names: Collection[str]) -> None:
        """Raise InvalidArgumentError if the patterns select nothing of these names, or one matches none of them."""
        for pattern in self.include:
            if not _any_match([pattern], names):
                raise InvalidArgumentError(_no_match("include", pattern, names))
        if names and not any(map(self.wants, names)):
            raise InvalidArgumentError(f"exclude patterns {list(self.exclude)} leave no tensor")

    def notes_on_exclude(self, names: Collection[str]) -> list[str]:
        """Return a note for each exclude pattern that matches none of these names."""
        return [_no_match("exclude", pattern, names) for pattern in self.exclude if not _any_match([pattern], names)]

    def notes_on_rename(self, names: Collection[str]) -> list[str]:
        """Return a note for each rename pattern that matches none of these names, after the renames before it."""
        notes: list[str] = []
        if callable(self.rename):
            return notes
        for pattern, replacement in self.rename:
            if not any(map(re.compile(pattern).search, names)):
                notes.append(_no_match("rename", pattern, names))
            # The next pattern is for the names that this one has made.
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
        return _any_match([pattern for pattern, _ in self.dtype], [name])

    def new_layout(self) -> Layout:
        """Return a new copy of the layout, in which no pattern has matched a name yet."""
        return Layout({}) if self.layout is None else self.layout.unmatched()


@dataclass(frozen=True, slots=True)
class LoadOptions(Selection):
    """The options by which a checkpoint's tensors are matched with live state.

    Patterns are of names in the state, or of what contains them. `rename` is from the source's names to the state's.
    Pipeline stages may load other names.

    Attributes:
        strict: names that are missing or unexpected are an error.
        dtype: None: dtypes must be equal; "state": floating values are cast to the dtype that the state has.
        readers: who reads what ranks of several hosts need alike: each "host", or one rank of the "job".
    """

    differing: ClassVar[tuple[str, ...]] = ("include", "exclude", "rename")

    strict: bool = _option(True, _flag, _text)
    dtype: str | None = _option(None, _state_dtype, _text)
    readers: Readers | None = _option(None, functools.partial(_choice, choices=(*get_args(Readers), None)), _text)

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
        # Up to its first wildcard a pattern names one path: what it may match begins with it, or contains it.
        for pattern in self.include:
            head = re.split(r"[*?[]", pattern, maxsplit=1)[0]
            if head.startswith(begin) or begin.startswith(head):
                return True
        return not self.include

    def casts(self, stored: str, live: str) -> bool:
        """Whether values of dtype `stored` are cast to `live`."""
        return self.dtype == "state" and stored in FLOATS and live in FLOATS


def unmatched(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """Return the patterns of a save or load that match none of these names."""
    left = []
    for pattern in patterns:
        if not any(_matches([pattern], name) for name in names):
            left.append(pattern)
    return left


def _any_match(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether a pattern matches a whole name."""
    for pattern in patterns:
        for name in names:
            if fnmatch.fnmatchcase(name, pattern):
                return True
    return False


def _no_match(option: str, pattern: str, names: Collection[str]) -> str:
    return f"{option} pattern {pattern!r} matches no tensor{did_you_mean(pattern, names)}"


def _matches(patterns: Sequence[str], name: str) -> bool:
    """Whether a pattern matches a path, or that of something that contains it. A list's index is a part, as "a.0"."""
    fits = _regex(tuple(patterns)).fullmatch
    return fits(name) is not None or ("[" in name and fits(with_dots(name)) is not None)


@functools.lru_cache(maxsize=16)
def _regex(patterns: tuple[str, ...]) -> re.Pattern[str]:
    texts = []
    shell_patterns = list(patterns)
    for pattern in patterns:
        # A path as messages show it, "a[0]", is a pattern for itself, and not for "a0" alone.
        if "[" in pattern:
            texts.append(re.escape(with_dots(pattern)))
        # "a[[]0]" is how a shell pattern says "a[0]", whose path is "a.0".
        if "[[]" in pattern:
            shell_patterns.append(_BRACKETS.sub(r".\1", pattern))
    for pattern in shell_patterns:
        # Without the anchor that newer Pythons write in another way; `fullmatch` needs none.
        texts.append(fnmatch.translate(pattern).removesuffix(r"\Z").removesuffix(r"\z"))
    # The end lets "model" match "model.a" and "model[0]".
    return re.compile("|".join(rf"{text}(?s:[.\[].*)?" for text in texts))


def mesh_option(layout: Layout | None) -> dict[str, str]:
    """Return the part of a layout that must be equal on all ranks, as text by name; {} if it has none."""
    if layout is None or not layout.mesh:
        return {}
    return {"layout's mesh": excerpt(dict(layout.mesh), _MAX_COMPARED)}


def renamed(name: str, rename: Rename) -> str:
    """Return the new name of a tensor."""
    if callable(rename):
        # The caller's function: whatever it raises is named with the tensor.
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


def check_equal_options(options: Sequence[Mapping[str, str]], path: str | None = None) -> None:
    """Raise InvalidArgumentError if an option differs between ranks; it names the option and both values."""
    first = options[0]
    for rank, rank_options in enumerate(options):
        if rank_options is first:
            # Equal metadata is one object.
            continue
        for option in {**first, **rank_options}:
            # An option at its default is not sent.
            value, rank_value = first.get(option, "the default"), rank_options.get(option, "the default")
            if value != rank_value:
                shown, rank_shown = value[:_MAX_SHOWN], rank_value[:_MAX_SHOWN]
                text = f"{option} is {shown} on rank 0 and {rank_shown} on rank {rank}: pass the same on all ranks"
                raise InvalidArgumentError(text, rank=rank, path=path)
