"""The exception tree: all errors that statexchange raises, their attributes, and their JSON form between ranks."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from statexchange.units import printable

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "CorruptError",
    "ForkedError",
    "IncompleteError",
    "InvalidArgumentError",
    "MismatchError",
    "MissingExtraError",
    "NotFoundError",
    "NotInitializedError",
    "NumericOverflowError",
    "OverlapError",
    "PeerError",
    "ReplacedError",
    "ReplicaError",
    "StallError",
    "StateExchangeError",
    "StorageError",
    "TargetExistsError",
    "TruncatedError",
    "UnknownNameError",
    "UnsafeError",
    "UnsupportedError",
    "did_you_mean",
    "excerpt",
    "from_record",
    "is_interrupt",
    "missing_extra",
    "needing_extra",
    "remedy",
    "secrets_of",
    "to_record",
    "type_text",
    "without_secrets",
]

# The length of a scheme is limited: otherwise a long text of letters and dots takes quadratic time.
_URL = re.compile(r"(?<!\w)(?!(?:file|shm)://)([A-Za-z][A-Za-z0-9+.-]{0,63}://)([^\s'\"<>]*)")
_CHAINED = re.compile(r"::(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_HOST = re.compile(r"([^:\[\]]*|\[[^\]]*\])(:[0-9]*)?")
_ABOUT = ("rank", "path", "name", "expected", "found")
_MAX_SIDE = 1000  # characters of an expected or found value in a message
_MAX_NAME = 600  # characters of a tensor's name in a message; a name that can be written has 512 bytes at most
_BRACKETS: dict[type, tuple[str, str]] = {
    list: ("[", "]"),
    tuple: ("(", ")"),
    dict: ("{", "}"),
    set: ("{", "}"),
    frozenset: ("frozenset({", "})"),
}


def excerpt(value: object, limit: int = 100) -> str:
    """Return the first `limit` characters of a value's repr, for a message.

    The work is bounded by `limit`, however large or deep the value is and however often it contains the same object.
    Use this for everything that was read from a file.
    """
    shown = ""
    waiting: list[tuple[bool, Any]] = [(False, value)]  # (is text, text or value)
    while waiting and len(shown) < limit:
        is_text, item = waiting.pop()
        kind = type(item)
        if is_text:
            shown += item
        elif kind in _BRACKETS:
            waiting += reversed(_pieces(item, limit))
        elif kind in (str, bytes):
            shown += repr(item[:limit])
        elif kind is int and item.bit_length() > 4 * limit:  # conversion to decimal takes quadratic time
            shown += hex(item)
        else:
            shown += repr(item)
    return shown[:limit]


def type_text(value: object) -> str:
    """Return the name of a value's type with its article, such as "an int", for a message."""
    name = type(value).__name__
    is_vowel = name[0] in "aeioAEIO" or name[:2] in ("un", "Un")
    return f"{'an' if is_vowel else 'a'} {name}"


def _pieces(container: Any, limit: int) -> list[tuple[bool, Any]]:
    """Return the parts of a container's repr, up to its first `limit` items."""
    # For [1, "a"]: (True, "["), (False, 1), (True, ", "), (False, "a"), (True, "]").
    opening, closing = _BRACKETS[type(container)]
    pieces: list[tuple[bool, Any]] = [(True, opening)]
    is_dict = type(container) is dict
    # Each item has at least one character of the excerpt.
    for number, item in enumerate(islice(container.items() if is_dict else container, limit)):
        if number:
            pieces.append((True, ", "))
        if is_dict:
            pieces += [(False, item[0]), (True, ": "), (False, item[1])]
        else:
            pieces.append((False, item))
    if type(container) is tuple and len(container) == 1:
        pieces.append((True, ","))
    return [*pieces, (True, closing)]


_NUMBER = re.compile(r"[0-9]+")
_MAX_COMPARED_NAMES = 5000  # names that differ in numbers alone count as one
_PARTS = re.compile(r"[^.*?^$|]+")  # the literal parts of a name, a shell pattern or a regex


def did_you_mean(pattern: str, names: Iterable[str]) -> str:
    """Return ``": did you mean 'x'?"`` with the names closest to a pattern or a mistyped name; "" if none is close.

    The dotted parts of the pattern are compared with as many successive parts of each name.
    """
    import difflib

    wanted = _PARTS.findall(_NUMBER.sub("0", pattern.replace("\\", "")))
    if not wanted:
        return ""
    # Each comparison takes some 10 us, so layers that differ in their number are compared once; and only so many names
    # are looked at, as a file may have millions.
    alike = {_NUMBER.sub("0", name): name for name in islice(names, 20 * _MAX_COMPARED_NAMES)}
    windows: dict[str, str] = {}
    for text, name in islice(alike.items(), _MAX_COMPARED_NAMES):
        parts = text.split(".")
        for start in range(max(1, len(parts) - len(wanted) + 1)):
            windows.setdefault(".".join(parts[start : start + len(wanted)])[:_MAX_NAME], name)
    close = difflib.get_close_matches(".".join(wanted)[:_MAX_NAME], windows, n=3)
    if not close:
        return ""
    # Two windows may be parts of one name.
    return f": did you mean {' or '.join(dict.fromkeys(excerpt(windows[window]) for window in close))}?"


def without_secrets(text: str) -> str:
    """Return a text with users, passwords and queries removed from all URLs, as these may grant access.

    Apply this to every URL in a message, log or repr; errors do it themselves. URLs in a chain (``zip://a::http://b``)
    are treated one by one. ``file://`` and ``shm://`` are local paths, which have neither.
    """
    return _URL.sub(_shown_url, text)


def _visible(text: str) -> str:
    """Return a text with all control and invisible characters but newlines escaped: a file may have chosen it.

    Otherwise a terminal that shows the error obeys them.
    """
    return "\n".join(map(printable, text.split("\n")))


def secrets_of(url: str) -> list[str]:
    """Return the credentials and queries in a URL or a chain of URLs, the longest first.

    Messages of libraries contain these parts without the URL around them.
    """
    secrets: list[str] = []
    for link in _CHAINED.split(url):
        user, _, query = _parts_of(link.partition("://")[2])
        secrets += filter(None, (user, query))
    # A caller that replaces a short one first would leave the rest of a longer one that contains it.
    return sorted(secrets, key=len, reverse=True)


def _shown_url(match: re.Match[str]) -> str:
    # zip://a::http://b is one match, whose later links have schemes of their own.
    scheme, rest = match.groups()
    first, *inner = _CHAINED.split(rest)
    return "::".join([scheme + _parts_of(first)[1], *map(without_secrets, inner)])


def _parts_of(rest: str) -> tuple[str, str, str]:
    """Split what follows ``://`` into the user with the password, the part that may be shown, and the query."""
    host = re.split("[/?]", rest, maxsplit=1)[0]
    user, at, _ = host.rpartition("@")
    if not at and "@" in rest and not _HOST.fullmatch(host):  # a password with slashes or question marks
        user, at, _ = rest.rpartition("@")
    shown, _, query = rest[len(user) + len(at) :].partition("?")
    return user, shown, query


class StateExchangeError(Exception):
    """Base of all errors that statexchange raises. The message ends with the rank, tensor and path concerned.

    An error ``("shapes differ", name="w", expected=[2], found=[3])`` reads
    ``shapes differ: expected [2], found [3] [tensor 'w']``.

    Attributes:
        rank: the rank, an int.
        path: the path or URL.
        name: the tensor's dotted name.
        expected: the expected value.
        found: the value found.

    Each is None where it does not apply. Instances can be pickled.
    """

    code: ClassVar[str] = "INTERNAL"
    attributes: ClassVar[tuple[str, ...]] = _ABOUT

    def __init__(
        self,
        message: str,
        *,
        rank: int | None = None,
        path: object = None,
        name: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        super().__init__()  # first, because ImportError's clears name and path
        self.message = _visible(without_secrets(message))
        self.rank = rank
        self.path = None if path is None else without_secrets(str(path))
        self.name = name
        self.expected = expected
        self.found = found
        self.args = (self._text(),)

    def located(
        self, *, rank: int | None = None, name: str | None = None, path: object = None, advice: str = ""
    ) -> Self:
        """Return the same error, of the same class, with rank, name or path filled in and `advice` added."""
        error = type(self).__new__(type(self))  # a subclass may have other constructor arguments
        error.__dict__.update(self.__dict__)
        for key in self.attributes:  # some are slots of the built-in base, not in __dict__
            setattr(error, key, getattr(self, key))
        if rank is not None:
            error.rank = rank
        if name is not None:
            error.name = name
        if path is not None:
            error.path = without_secrets(str(path))
        if advice:
            error.message += f"; {advice}"
        error.args = (str(error),)  # what `repr` and a debugger show
        return error

    def _text(self) -> str:
        text = self.message
        sides = []
        if self.expected is not None:
            sides.append(f"expected {_side(self.expected)}")
        if self.found is not None:
            sides.append(f"found {_side(self.found)}")
        if sides:
            text += f": {', '.join(sides)}"
        about = []
        if self.name:
            about.append(f"tensor {excerpt(self.name, _MAX_NAME)}")
        if self.rank is not None:
            about.append(f"rank {self.rank}")
        if self.path is not None:
            about.append(_visible(self.path))
        if about:
            text += f" [{', '.join(about)}]"
        return text

    def __str__(self) -> str:
        return self._text()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, {key: getattr(self, key) for key in self.attributes})


def _side(value: object) -> str:
    text = excerpt(value, _MAX_SIDE) if type(value) in (*_BRACKETS, int) else str(value)
    return text if len(text) <= _MAX_SIDE else excerpt(text, _MAX_SIDE)


class InvalidArgumentError(StateExchangeError, ValueError):
    """An argument is invalid, whatever the state of files and ranks."""

    code = "USAGE"


class NotInitializedError(StateExchangeError, RuntimeError):
    """A launcher has started several ranks, but there is no communicator, or it is closed."""

    code = "USAGE"


class ForkedError(StateExchangeError, RuntimeError):
    """This process was forked from a rank, whose communicator it cannot use."""

    code = "USAGE"


class MissingExtraError(StateExchangeError, ImportError):
    """An optional dependency is needed; the message has the command that installs it."""

    code = "USAGE"


class NotFoundError(StateExchangeError, FileNotFoundError):
    """There is no such path, or no known checkpoint at it."""

    code = "NOT_FOUND"


class UnknownNameError(NotFoundError, KeyError):
    """An open checkpoint has no tensor of this name."""


class CorruptError(StateExchangeError, ValueError):
    """A header, digest, index or manifest contradicts the bytes, or contradicts another one."""

    code = "CORRUPT"


class TruncatedError(CorruptError):
    """A file has fewer bytes than it needs; `expected` and `found` are numbers of bytes."""


class OverlapError(CorruptError):
    """Boxes of two ranks overlap without being equal."""


class ReplicaError(CorruptError):
    """Copies of one box that must be equal differ between ranks."""


class IncompleteError(StateExchangeError, ValueError):
    """A rank, a file or a region of a tensor is missing."""

    code = "INCOMPLETE"


class TargetExistsError(StateExchangeError, FileExistsError):
    """The target exists, or another process is writing it."""

    code = "UNSAFE"


class UnsafeError(StateExchangeError, ValueError):
    """Refused, because continuing could lose data or run foreign code."""

    code = "UNSAFE"


class UnsupportedError(StateExchangeError, TypeError):
    """A dtype, layout or type that cannot be represented faithfully."""

    code = "UNSAFE"


class MismatchError(StateExchangeError, ValueError):
    """Ranks made different calls, or run different versions. The message shows each call and the line that made it."""

    code = "USAGE"


class NumericOverflowError(StateExchangeError, OverflowError):
    """The result of a reduction does not fit into the dtype of its tensors."""

    code = "UNSAFE"


def remedy(number: int | None) -> str:
    """Return what to do after a write that failed with this errno, as the end of a message; "" if that is unknown."""
    if number == errno.ENOSPC:
        return "; free space there (df -h, df -i), or choose another disk"
    if number == errno.EDQUOT:
        return "; free space within your quota there, or choose another disk"
    if number in (errno.EMFILE, errno.ENFILE):
        return "; raise the limit (ulimit -n), or write fewer files (max_shard_size)"
    return ""


class StorageError(StateExchangeError, OSError):
    """The operating system refused a read or write; ``errno`` is kept."""

    code = "IO"
    attributes = (*_ABOUT, "errno")

    def __init__(self, message: str, *, errno: int | None = None, **about: Any) -> None:
        super().__init__(message, **about)
        self.errno = errno

    @classmethod
    def of(cls, error: OSError, doing: str, **about: Any) -> StorageError:
        """Return the error for an OSError; `doing` completes "cannot ..."."""
        return cls(f"cannot {doing}: {error.strerror or error}{remedy(error.errno)}", errno=error.errno, **about)


class ReplacedError(StorageError):
    """Another process replaced, removed or changed a file while it was read: read it again."""


class StallError(StateExchangeError, TimeoutError):
    """A wait timed out; ``missing`` lists all ranks that did not arrive."""

    code = "TIMEOUT"
    attributes = (*_ABOUT, "missing")

    def __init__(self, message: str, *, missing: tuple[int, ...] = (), **about: Any) -> None:
        super().__init__(message, **about)
        self.missing = tuple(missing)


class PeerError(StateExchangeError, RuntimeError):
    """Another rank failed.

    Attributes:
        rank: the rank; -1 if the transport does not report it.
        phase: the call in which it failed, or in which this rank waited for it.
        cause: its error.
        host: its host, if known.
    """

    code = "IO"

    def __init__(self, rank: int, phase: str, cause: str, host: str | None = None) -> None:
        self.phase = phase
        self.cause = cause = without_secrets(cause)
        self.host = host
        subject = f"rank {rank}" if rank >= 0 else "a rank (its own log has the details)"
        where = f" on {host}" if host else ""
        super().__init__(f"{subject}{where} failed in {phase}: {cause}")
        self.rank: int = rank

    def _text(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.phase, self.cause, self.host)


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether an error is a KeyboardInterrupt, or arose from one.

    Python before 3.12 replaces what is raised in `__set_name__`, while a class is made, by a RuntimeError.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        # Without `raise ... from` the error that was being handled is the cause.
        error = error.__cause__ or error.__context__
    return error is not None


# The extra that installs each optional package
_EXTRAS = {"torch": "torch", "accelerate": "hf", "transformers": "hf", "zstandard": "versions"}


def missing_extra(what: str, package: str) -> MissingExtraError:
    """Return the error for `what`, which needs an optional package that is not installed."""
    return MissingExtraError(f'{what} needs {package}: pip install "statexchange[{_EXTRAS[package]}]"')


@contextlib.contextmanager
def needing_extra(what: str) -> Iterator[None]:
    """Translate a failed import of an optional package in the block to MissingExtraError; `what` needs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in _EXTRAS:
            raise
        raise missing_extra(what, error.name) from error


# Pickle calls it by name, with positional arguments; the constructors take keywords.
def _rebuild(cls: type[StateExchangeError], message: str, about: dict[str, Any]) -> StateExchangeError:
    return cls(message, **about)


def _tree(cls: type[StateExchangeError]) -> dict[str, type[StateExchangeError]]:
    """Return `cls` and all its subclasses by name."""
    classes = {cls.__name__: cls}
    for subclass in cls.__subclasses__():
        classes |= _tree(subclass)
    return classes


def to_record(error: BaseException, rank: int, phase: str, host: str | None = None) -> dict[str, Any]:
    """Return a JSON object that describes the error of `rank` on `host` to the other ranks."""
    # The failure of another rank is passed on unchanged: all ranks name the one that failed first.
    if isinstance(error, PeerError):
        fields = {"rank": error.rank, "phase": error.phase, "cause": error.cause, "host": error.host}
        return {"type": "PeerError", **fields}
    if not isinstance(error, StateExchangeError):
        return {
            "type": "PeerError",
            "rank": rank,
            "phase": phase,
            "cause": f"{type(error).__name__}: {_message_of(error)}".removesuffix(": "),
            "host": host,
        }
    # A subclass defined elsewhere may need other arguments, so its nearest base in this module is sent.
    base: type[StateExchangeError] = next(base for base in type(error).__mro__ if base.__module__ == __name__)
    about = {key: _portable(getattr(error, key)) for key in base.attributes}
    if error.rank is None:
        about["rank"] = rank
    return {"type": base.__name__, "message": error.message, "about": about}


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (the failure must reach the other ranks, whatever a foreign __str__ does)
        return "(its message cannot be shown)"


def _portable(value: object) -> object:
    # The ranks in StallError.missing, and shapes
    if isinstance(value, tuple) and all(type(item) is int for item in value):
        return value
    return value if value is None or type(value) in (bool, int, str) else str(value)


def from_record(record: dict[str, Any]) -> StateExchangeError:
    """Return the error that `to_record` described; a StateExchangeError if its class is not known here."""
    if record["type"] == "PeerError":
        return PeerError(record["rank"], record["phase"], record["cause"], record.get("host"))
    cls = _tree(StateExchangeError).get(record["type"], StateExchangeError)
    about: dict[str, Any] = {}
    for key in cls.attributes:
        value = record["about"][key]
        # JSON has made lists of tuples.
        about[key] = tuple(value) if isinstance(value, list) else value
    return cls(record["message"], **about)
