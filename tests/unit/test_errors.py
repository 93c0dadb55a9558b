"""Errors keep their class and attributes: by pickle between processes, as JSON records between ranks."""

import json
import pickle

import pytest

from statexchange import errors
from statexchange.errors import (
    CorruptError,
    PeerError,
    StallError,
    StateExchangeError,
    StorageError,
    excerpt,
    from_record,
    to_record,
)
from statexchange.storage import files

BUILTINS = {
    "CorruptError": ValueError, "IncompleteError": ValueError, "InvalidArgumentError": ValueError,
    "ForkedError": RuntimeError, "MismatchError": ValueError, "NumericOverflowError": OverflowError,
    "MissingExtraError": ImportError, "NotFoundError": FileNotFoundError, "NotInitializedError": RuntimeError,
    "OverlapError": CorruptError, "PeerError": RuntimeError, "ReplacedError": StorageError,
    "ReplicaError": CorruptError, "StallError": TimeoutError,
    "StateExchangeError": Exception, "StorageError": OSError, "TargetExistsError": FileExistsError,
    "TruncatedError": CorruptError, "UnknownNameError": KeyError,
    "UnsafeError": ValueError, "UnsupportedError": TypeError,
}  # fmt: skip
CODES = {"INTERNAL", "USAGE", "NOT_FOUND", "CORRUPT", "INCOMPLETE", "UNSAFE", "IO", "TIMEOUT"}


def example(name: str) -> StateExchangeError:
    cls = getattr(errors, name)
    if cls is PeerError:
        return PeerError(3, "saving", "disk full")
    about = {"rank": 2, "path": "/a/b", "name": "w", "expected": (4, 8), "found": "x"}
    about |= {"errno": 28} if issubclass(cls, StorageError) else {}
    about |= {"missing": (1, 5)} if issubclass(cls, StallError) else {}
    return cls("it broke", **about)


def attributes_of(error: StateExchangeError) -> tuple[object, ...]:
    return type(error), str(error), error.args, {k: v for k, v in vars(error).items() if k != "args"}


@pytest.mark.parametrize("name", BUILTINS)
def test_every_error_survives_pickle_and_record(name: str) -> None:
    error = example(name)
    assert issubclass(type(error), BUILTINS[name])
    assert type(error).code in CODES
    assert attributes_of(pickle.loads(pickle.dumps(error))) == attributes_of(error)
    assert attributes_of(from_record(json.loads(json.dumps(to_record(error, 2, "saving"))))) == attributes_of(error)


def test_every_public_error_is_in_the_table() -> None:
    assert {name for name in errors.__all__ if name.endswith("Error")} == BUILTINS.keys()


def test_the_message_names_tensor_rank_and_path() -> None:
    text = str(CorruptError("digest differs", rank=3, path="/x", name="layer.w", expected="aa", found="bb"))
    assert text == "digest differs: expected aa, found bb [tensor 'layer.w', rank 3, /x]"


def test_control_characters_of_files_are_escaped_in_the_message() -> None:
    """A terminal would obey them. The attributes keep what was given."""
    error = CorruptError("the class \x1b[31mred\nis unknown", name="a\x07", path="/x/\x1b]0;title\x07")
    assert str(error) == "the class \\x1b[31mred\nis unknown [tensor 'a\\x07', /x/\\x1b]0;title\\x07]"
    assert str(error.located(rank=1)).replace("\n", "").isprintable()
    assert (error.name, error.path) == ("a\x07", "/x/\x1b]0;title\x07")


def test_attributes_of_builtin_errors_are_overridden() -> None:
    error = pickle.loads(pickle.dumps(StorageError("no room", errno=28, path="/x", name="w")))
    assert (error.errno, error.path, error.name, error.expected, error.rank) == (28, "/x", "w", None, None)
    assert errors.MissingExtraError("torch?", name="n", path="/p").name == "n"


def test_an_os_error_keeps_its_errno_and_names_the_operation() -> None:
    error = StorageError.of(OSError(28, "No space left on device"), "write", path="/x")
    assert error.errno == 28
    text = "cannot write: No space left on device; free space there (df -h, df -i), or choose another disk [/x]"
    assert str(error) == text
    assert str(StorageError.of(OSError(5, "I/O error"), "write", path="/x")) == "cannot write: I/O error [/x]"


def test_a_full_disk_is_said_with_the_bytes_that_it_has_no_room_for() -> None:
    text = r"write 5 bytes: No"
    with open("/dev/full", "wb") as full, pytest.raises(StorageError, match=text) as caught:
        files.pwrite_all(full.fileno(), b"bytes", 0, "/d/full")
    assert (caught.value.errno, caught.value.path) == (28, "/d/full")


def test_a_record_names_the_rank_that_failed() -> None:
    assert to_record(CorruptError("x"), 4, "planning")["about"]["rank"] == 4
    assert to_record(CorruptError("x", rank=0), 4, "planning")["about"]["rank"] == 0
    foreign = from_record(json.loads(json.dumps(to_record(KeyError("w"), 4, "planning"))))
    assert type(foreign) is PeerError
    assert (foreign.rank, foreign.phase, foreign.cause) == (4, "planning", "KeyError: 'w'")


def test_attributes_that_are_not_json_become_text() -> None:
    error = from_record(json.loads(json.dumps(to_record(CorruptError("x", expected=(b"a", 1), found={1, 2}), 0, ""))))
    assert (error.expected, error.found) == ("(b'a', 1)", "{1, 2}")


class BrokenPartError(CorruptError):
    """A subclass outside the package, with another constructor."""

    def __init__(self, part: set[int]) -> None:
        super().__init__(f"part {part} is broken", rank=7)
        self.part = part


def test_a_located_error_is_of_the_same_class_and_keeps_the_rest() -> None:
    error = BrokenPartError({3}).located(name="w", path="/x")
    assert (type(error), error.part) == (BrokenPartError, {3})
    assert str(error) == "part {3} is broken [tensor 'w', rank 7, /x]"
    io = StorageError("no room", errno=28, path="/x", name="w").located(rank=3, path="/y")
    assert (type(io), io.errno, str(io)) == (StorageError, 28, "no room [tensor 'w', rank 3, /y]")
    assert str(pickle.loads(pickle.dumps(io))) == str(io)


def test_a_foreign_class_becomes_its_nearest_public_base() -> None:
    error = from_record(json.loads(json.dumps(to_record(BrokenPartError({3}), 2, "saving"))))
    assert (type(error), str(error), error.rank) == (CorruptError, "part {3} is broken [rank 7]", 7)


def test_an_unknown_class_becomes_a_plain_error() -> None:
    record = to_record(StorageError("no room", errno=28, path="/x"), 1, "saving")
    error = from_record({**record, "type": "ErrorOfTheFuture"})
    assert (type(error), error.path, error.rank) == (StateExchangeError, "/x", 1)


class Large:
    """Its repr is longer than most excerpts."""

    def __repr__(self) -> str:
        return "Large" * 100


@pytest.mark.parametrize(
    "value",
    [
        None,
        "it's",
        b"bytes",
        -17,
        1 << 300,
        2.5,
        [],
        (),
        (1,),
        {},
        [1, "a", (2, [3])],
        {"a": {"b": (1, 2)}, 3: [None]},
        {7},
        frozenset({7}),
        Large(),
        ["x" * 500],
    ],
)
@pytest.mark.parametrize("limit", [4, 100, 1000])
def test_an_excerpt_is_the_beginning_of_the_repr(value: object, limit: int) -> None:
    if type(value) is int and value.bit_length() > 4 * limit:
        assert excerpt(value, limit) == hex(value)[:limit]
    else:
        assert excerpt(value, limit) == repr(value)[:limit]


def test_an_excerpt_of_a_huge_value_is_cheap() -> None:
    shared: object = 1
    for _ in range(100_000):  # deeper than repr can recurse, and of 2**100_000 values
        shared = [shared, shared]
    assert excerpt(shared) == "[" * 100
    assert excerpt([[]] * 10_000_000, 8) == "[[], [],"
    assert excerpt(1 << 1_000_000, 10) == "0x10000000"
    error = CorruptError("broken", name="n" * 1_000_000, expected=[[1] * 1_000_000], found=shared)
    assert len(str(error)) < 4000
