"""Read a long pickle, of which runs of alike records become columns of numbers.

The `.metadata` of a DCP directory of 10,000 ranks has ten million boxes. One after another they would take the pickle
machine an hour. But their records differ only in their numbers and texts. So where a batch of a list or a dict begins
with a record of a known form, all records of a window of bytes are read side by side: numpy moves a cursor in each of
them over one field after another. A record counts only if all its opcodes are the expected ones, and if it begins where
the one before ends. At the first that does not, the machine goes on. A run is left in the pickle's value as an
`OpaqueObject` named `RUN`, whose arguments are its columns.

Python's pickler writes frames; without these headers the opcodes are one stream. What the machine would do with a
record is known, and nothing is called: it counts the objects that the record memoizes. Of these only the names of files
are kept. A pickle that refers to others is left to the general reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from statexchange.formats.pickles import GlobalRef, OpaqueObject, PickleMachine, PickleValue

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from statexchange.storage.store import Budget, StoredFile

RUN = "run of records"
_FRAME = b"\x95"
_FRAME_HEADER = 9  # bytes: the opcode and the length
_FIRST_WINDOW, _LAST_WINDOW = 1 << 16, 1 << 20  # bytes that are read side by side: columns of more leave the cache
_PADDING = 1 << 12  # zeros behind a window; no record is longer
_LEAST_RECORDS = 32  # fewer are not worth the columns
_MOST_SKIPPED = 1 << 10
_MAX_DIMS = 8
_MOST_LONG_BYTES = 6


class IrregularPickleError(Exception):
    """A pickle that only the general reader reads."""


class Columns(NamedTuple):
    """The fields of a run of records, by name, each with a value for each record.

    A number is in `numbers`, -1 for None; a torch.Size as a row of `sizes`, filled up with 0, and its length in `dims`;
    of a text there is its number in `numbers`, by which `texts` has it.
    """

    numbers: dict[str, NDArray[Any]]
    sizes: dict[str, NDArray[np.int64]]
    dims: dict[str, NDArray[np.int8]]
    texts: Mapping[str, Mapping[bytes, int]]


class _Field(NamedTuple):
    """A field: the name of its column, its key in the state of the object, and "size", "number" or "text"."""

    name: str
    key: str
    kind: str


_Object: TypeAlias = tuple[str, tuple[_Field, ...]]
_FQN, _INDEX, _AT = (
    _Field("fqn", "fqn", "text"),
    _Field("index", "index", "number"),
    _Field("offsets", "offset", "size"),
)
_CHUNK: _Object = (
    "ChunkStorageMetadata",
    (_Field("offsets", "offsets", "size"), _Field("sizes", "sizes", "size")),
)
_INFO: _Object = (
    "_StorageInfo",
    (
        _Field("file", "relative_path", "text"),
        _Field("begin", "offset", "number"),
        _Field("length", "length", "number"),
    ),
)
# By the class of a record's first object, the objects of a record with their fields in the orders in which versions of
# torch write them.
_FORMS: dict[str, tuple[tuple[_Object, ...], ...]] = {
    "ChunkStorageMetadata": ((_CHUNK,),),
    "MetadataIndex": (
        (("MetadataIndex", (_FQN, _INDEX, _AT)), _INFO),
        (("MetadataIndex", (_FQN, _AT, _INDEX)), _INFO),
    ),
}
_SEPARATORS = {"ChunkStorageMetadata": b"e(", "MetadataIndex": b"u("}  # between two batches of a list or of a dict
_NEW = b")\x81\x94}\x94("  # behind the class of an object: it is made and memoized, and so is the dict of its state
_SIZE_END = b"\x85\x94R\x94"  # behind the tuple of a torch.Size


def read_long_pickle(file: StoredFile, path: str, budget: Budget) -> PickleValue:
    """Return what a pickle has, as `pickles.read_pickle`, with runs of records as columns.

    Raises:
        IrregularPickleError: it is not written in frames, or refers to an object of a run.
    """
    return _RunMachine(_Frames(file), path, budget).result()


class _Frames:
    """The opcodes of a pickle without the headers of its frames, as a file that is read forward."""

    def __init__(self, file: StoredFile) -> None:
        self._file = file
        # The file is read from front to back, one frame of some 64 KiB at a time: of an object store each would be a
        # request.
        file.read_ahead(_LAST_WINDOW)
        start = file.first_bytes(2 + _FRAME_HEADER)
        if start[:1] != b"\x80":
            raise IrregularPickleError
        self._header = start[2:]
        self._next = len(start)  # the offset behind that header
        self._data = b""
        self._at = 0

    def _fill(self, nbytes: int) -> None:
        """Read frames until there are so many bytes, or the file ends."""
        parts = [self._data[self._at :]]
        missing = nbytes - len(parts[0])
        while missing > 0 and self._next < self._file.size:
            length = int.from_bytes(self._header[1:], "little")
            # The pickler ends a frame after 64 KiB, and writes what is longer between frames. A larger frame would be
            # read into memory at once, and could be a hole of a file that has terabytes but takes no space on disk.
            if self._header[:1] != _FRAME or length > min(_LAST_WINDOW, self._file.size - self._next):
                raise IrregularPickleError
            # A frame and the header of the next one in one read. The last frame has none behind it.
            frame = bytearray(min(length + _FRAME_HEADER, self._file.size - self._next))
            self._file.read_into(memoryview(frame), self._next)
            self._next += len(frame)
            self._header = bytes(frame[length:])
            del frame[length:]
            parts.append(bytes(frame))
            missing -= length
        self._data, self._at = b"".join(parts), 0

    def peek(self, nbytes: int) -> bytes:
        """Return the next bytes without moving; fewer at the end."""
        if self._at + nbytes > len(self._data):
            self._fill(nbytes + _LAST_WINDOW)
        return self._data[self._at : self._at + nbytes]

    def read(self, nbytes: int) -> bytes:
        """Return the next bytes; fewer at the end."""
        data = self.peek(nbytes)
        self._at += len(data)
        return data

    def readline(self) -> bytes:
        """Refuse an opcode with lines, which no pickle in frames has."""
        raise IrregularPickleError

    def tell(self) -> int:
        """Return about where in the file the next byte lies."""
        return self._next - len(self._header) - len(self._data) + self._at


class _Memo(dict[int, PickleValue]):
    """The memo of a pickle, without most of what runs have memoized.

    Attributes:
        end: the number of the next object.
    """

    end = 0

    def __missing__(self, number: int) -> PickleValue:
        if number < self.end:
            raise IrregularPickleError
        raise KeyError(number)


class _Step(NamedTuple):
    """Opcodes that are equal in all records, and the field behind them; None at a record's end."""

    literal: bytes
    field: _Field | None


class _Form:
    """A form of records, as this pickle writes it.

    Attributes:
        steps: what a record consists of.
        separator: the opcodes between two batches of records.
        prefix: the opcodes with which a record begins.
        mark: the place of a seldom one in these.
        num_memoized: the objects that a record memoizes beside those of its fields.
        window: bytes that are read side by side.
        skips: how many batches are left to the machine, as the last runs were short.
        penalty: how many that will be after the next short one.
    """

    def __init__(self, steps: Sequence[_Step], separator: bytes) -> None:
        self.steps = steps
        self.separator = separator
        self.prefix = steps[0].literal
        self.mark = self.prefix.index(_NEW) + 1
        self.num_memoized = 2 * sum(step.literal.count(_NEW) for step in steps)
        self.window = _FIRST_WINDOW
        self.skips = self.penalty = 0


class _RunMachine(PickleMachine):
    """A pickle machine that looks for a run where a batch begins.

    `texts` has the texts of each field in runs, with their numbers.
    """

    def __init__(self, frames: _Frames, path: str, budget: Budget) -> None:
        super().__init__(frames, path, budget, unknown_classes=False)
        self._frames = frames
        self.memo = self._memo = _Memo()
        self._forms: dict[str, list[_Form]] = {}
        # The run above each mark, by the number of marks. It is not on the stack, where the next opcodes could memoize
        # or change the last record: there they find nothing, and the general reader has to read the pickle.
        self._runs: dict[int, list[OpaqueObject | None]] = {}
        self.texts: dict[str, dict[bytes, int]] = {}

    def put(self, number: int) -> None:  # noqa: ARG002 (it overrides)
        """Refuse to memoize under a given number: only by next ones it is known how many a run has memoized."""
        raise IrregularPickleError

    def put_next(self) -> None:
        """Memoize the top of the stack under the next number."""
        # `end` and not the length, which `put_next` of the base takes: runs memoize without an entry here.
        self._memo[self._memo.end] = self.stack[-1]
        self._memo.end += 1

    def begin_stack(self) -> None:
        """Begin a new stack, and take the run with which its items begin."""
        super().begin_stack()
        # Each batch of items begins with a mark, and each record with a reference to its class in the memo: only the
        # first record of a pickle spells the class out, and is read by the machine.
        start = self._frames.peek(5)
        if start[:1] not in (b"h", b"j"):
            return
        # BINGET has one byte, LONG_BINGET four.
        number = start[1]
        if start[:1] == b"j":
            number = int.from_bytes(start[1:], "little")
        ref = self._memo.get(number)
        if type(ref) is not GlobalRef or ref.name not in _FORMS:
            return
        # An empty list is looked for again: the names of a record's fields are in the memo only after the first record.
        if not self._forms.get(ref.name):
            self._forms[ref.name] = self._forms_of(ref.name)
        for form in self._forms[ref.name]:
            if form.skips:
                form.skips -= 1
                continue
            columns = self._take(form)
            if columns is not None:
                run = self._runs.setdefault(len(self.outer_stacks), [OpaqueObject(RUN, (columns,))])
                if ref.name == "MetadataIndex":  # in a dict the run is a key, and SETITEMS takes pairs
                    run.append(None)
                return

    def run(self) -> PickleValue:
        """Run to the end and return the one value that is left on the stack."""
        try:
            return super().run()
        except (LookupError, ValueError):
            # An opcode may have reached for the last record: the general reader has it on the stack.
            if len(self.outer_stacks) in self._runs:
                raise IrregularPickleError from None
            raise

    def above_mark(self) -> list[PickleValue]:
        """Return the items above the last mark, after the run with which they begin."""
        return [*self._runs.pop(len(self.outer_stacks), ()), *super().above_mark()]

    def _forms_of(self, name: str) -> list[_Form]:
        """Return the forms of records that begin with an object of a class; none before one has been read."""
        references: dict[object, bytes] = {}
        for number, value in self._memo.items():
            if type(value) in (str, GlobalRef):
                references[value] = _reference(number)
        forms = []
        for objects in _FORMS[name]:
            try:
                forms.append(_Form(_steps(objects, references), _SEPARATORS[name]))
            except KeyError:
                continue
        return forms

    def _take(self, form: _Form) -> Columns | None:
        """Move behind the run of records that begins here, and return its columns; None if there are only a few."""
        windows: list[Columns] = []
        nbytes, is_cut = self._take_window(form, windows)
        while is_cut:
            # The pickler ends a batch after 1,000 items: else each would be a run of its own, with short columns.
            if self._frames.peek(len(form.separator)) == form.separator:
                if not self._frames.peek(len(form.separator) + len(form.prefix)).endswith(form.prefix):
                    break
                self._frames.read(len(form.separator))
            more, is_cut = self._take_window(form, windows)
            nbytes += more
        if not windows:
            # A tensor in a few boxes is no run. Where there are many, looking each time would cost more than it saves.
            form.skips = form.penalty
            form.penalty = min(2 * form.penalty + 1, _MOST_SKIPPED)
            return None
        form.penalty = 0
        form.window = min(nbytes + _PADDING, _LAST_WINDOW)  # the next run is often as long
        return joined(windows)

    def _take_window(self, form: _Form, windows: list[Columns]) -> tuple[int, bool]:
        """Read the records of one window into `windows`; return their bytes, and whether the window cuts the run."""
        data = self._frames.peek(form.window)
        if not data.startswith(form.prefix):
            return 0, False
        # All records of the window at once, also those that turn out to be none: what is wrong with a cursor ends the
        # run there.
        cursors = _Cursors(data, form)
        starts = cursors.at.copy()
        for step in form.steps:
            cursors.literal(step.literal)
            if step.field is not None:
                getattr(cursors, step.field.kind)(step.field.name)
        count = cursors.num_valid(starts, form.separator)
        if count < (1 if windows else _LEAST_RECORDS):
            return 0, False
        windows.append(self._columns(cursors, count))
        # Only now the opcodes count as read. What follows is for the machine, or for the next window.
        end = int(cursors.at[count - 1])
        self._frames.read(end)
        form.window = min(2 * form.window, _LAST_WINDOW)
        # A record may have failed because the window ends in it, and zeros follow: then the next window begins with it.
        return end, count == len(starts) or int(starts[count]) + _PADDING > len(data)

    def _columns(self, cursors: _Cursors, count: int) -> Columns:
        """Return the columns of the first records of a window, and count what these memoize."""
        # A sum that excludes the record itself: the number of the first object that each memoizes.
        memoized = cursors.memoized[:count]
        firsts = self._memo.end + np.cumsum(memoized) - memoized
        self._memo.end = int(firsts[-1] + memoized[-1])
        numbers = {name: column[:count] for name, column in cursors.numbers.items()}
        for name, texts in cursors.texts.items():
            # Damage can make a record refer to a text that a later one memoizes: in order it would not be there yet.
            if (texts.references[:count] >= firsts + texts.memoized[:count]).any():
                raise IrregularPickleError
            if name == "file":
                for row in np.flatnonzero(texts.references[:count] < 0).tolist():
                    self._memo[int(firsts[row] + texts.memoized[row])] = _decoded(cursors.text_at(texts, row))
            numbers[name] = self._numbers_of(cursors, name, texts, count)
        sizes = {name: column[:count] for name, column in cursors.sizes.items()}
        return Columns(numbers, sizes, {name: column[:count] for name, column in cursors.dims.items()}, self.texts)

    def _numbers_of(self, cursors: _Cursors, name: str, texts: _Texts, count: int) -> NDArray[Any]:
        """Return the numbers of the texts of a field; new ones get the next numbers."""
        # A dict keeps the order in which texts were added: the number of a text is its place.
        known = self.texts.setdefault(name, {})
        references = texts.references[:count]
        numbers = np.empty(count, np.int32)
        inline = references < 0
        data, new = cursors.data, known.setdefault
        places = zip(texts.begins[:count][inline].tolist(), texts.ends[:count][inline].tolist(), strict=True)
        slices = [data[begin:end] for begin, end in places]
        try:
            numbers[inline] = [known[text] for text in slices]
        except KeyError:
            numbers[inline] = [new(text, len(known)) for text in slices]
        # One look-up for each text, not for each record: many records refer to the name of the same file.
        for reference in np.unique(references[~inline]).tolist():
            text = self._memo[reference]
            if type(text) is not str:
                raise IrregularPickleError
            numbers[references == reference] = new(text.encode(), len(known))
        return numbers


def _steps(objects: Sequence[_Object], references: Mapping[object, bytes]) -> list[_Step]:
    """Return what a record of these objects consists of; raise KeyError if the memo does not have all names in it."""
    steps = []
    literal = b""
    for class_name, fields in objects:
        literal += references[GlobalRef(class_name)] + _NEW
        for field in fields:
            literal += references[field.key]
            if field.kind == "size":
                literal += references[GlobalRef("Size")]
            steps.append(_Step(literal, field))
            literal = b""
        literal += b"ub"
    return [*steps, _Step(literal, None)]


def _reference(number: int) -> bytes:
    """Return the opcode that gets an object from the memo."""
    return b"h" + bytes([number]) if number < 256 else b"j" + number.to_bytes(4, "little")


def _decoded(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise IrregularPickleError from None


def joined(windows: Sequence[Columns]) -> Columns:
    """Return the columns of successive windows or runs as one; several are emptied on the way."""
    first = windows[0]
    if len(windows) == 1:
        return first
    # One column after another, so that a second copy of all is never there.
    numbers, dims, sizes = {}, {}, {}
    for name in [*first.numbers]:
        numbers[name] = np.concatenate([window.numbers.pop(name) for window in windows])
    for name in [*first.dims]:
        dims[name] = np.concatenate([window.dims.pop(name) for window in windows])
    for name in [*first.sizes]:
        of_windows = [window.sizes.pop(name) for window in windows]
        most = max(column.shape[1] for column in of_windows)
        sizes[name] = np.concatenate([_padded(column, most) for column in of_windows])
    return Columns(numbers, sizes, dims, first.texts)


def _padded(sizes: NDArray[np.int64], num_dims: int) -> NDArray[np.int64]:
    """Return rows of sizes, filled up with 0 to so many."""
    missing = num_dims - sizes.shape[1]
    return np.pad(sizes, ((0, 0), (0, missing))) if missing else sizes


def _narrow(numbers: NDArray[np.int64]) -> NDArray[Any]:
    """Return the numbers in half the memory, if they are small."""
    return numbers.astype(np.int32) if numbers.size and numbers.max() < 1 << 31 else numbers


class _Texts(NamedTuple):
    """The places of the texts of a field.

    Attributes:
        begins: of each text that is written here.
        ends: of each text that is written here.
        references: the number in the memo of each other one; -1 for those that are written here.
        memoized: how many objects its record has memoized before it.
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    references: NDArray[np.int64]
    memoized: NDArray[np.int64]


def _table(default: int, **values: int) -> NDArray[np.int64]:
    table = np.full(256, default, np.int64)
    for code, value in values.items():
        table[ord(code)] = value
    return table


_LONG1, _NONE, _MARK, _MEMOIZE, _SHORT_TEXT = 0x8A, ord("N"), ord("("), 0x94, 0x8C
_WIDTHS = _table(-1, K=1, M=2, J=4)  # bytes of an integer, by its opcode
_WIDTHS[_LONG1] = 1  # and as many as this says
_MASKS = np.array([(1 << 8 * nbytes) - 1 for nbytes in range(8)], np.uint64)
_TUPLES = np.frombuffer(b")\x85\x86\x87ttttt", np.uint8)  # by the number of items


class _Cursors:
    """A cursor in each record of a window: `at` has their positions, and `is_valid` whether all was as expected."""

    def __init__(self, data: bytes, form: _Form) -> None:
        self.data = data
        self._bytes = np.zeros(len(data) + _PADDING, np.uint8)
        self._bytes[: len(data)] = np.frombuffer(data, np.uint8)
        self._words = np.ndarray(len(self._bytes) - 8, "<u8", self._bytes, strides=(1,))  # one begins at each byte
        # A record begins where the prefix lies, and perhaps a text or number looks like it: `num_valid` decides.
        candidates = np.flatnonzero(self._bytes[: len(data)] == form.prefix[form.mark]) - form.mark
        candidates = candidates[candidates >= 0]
        self.at = candidates[self._matches(candidates, form.prefix[:8])]
        self.is_valid = np.ones(len(self.at), bool)
        self.memoized = np.full(len(self.at), form.num_memoized)
        self.numbers: dict[str, NDArray[np.int64]] = {}
        self.sizes: dict[str, NDArray[np.int64]] = {}
        self.dims: dict[str, NDArray[np.int8]] = {}
        self.texts: dict[str, _Texts] = {}

    def num_valid(self, starts: NDArray[np.int64], separator: bytes) -> int:
        """Return how many records follow one another from the first on."""
        # Each record begins where the one before ends, or a separator later: so no bytes lie between two.
        ends = self.at[:-1]
        follows = ends == starts[1:]
        follows |= (ends + len(separator) == starts[1:]) & self._matches(ends, separator)
        # A cursor may have moved into the padding, where zeros are no records.
        valid = self.is_valid & (self.at <= len(self.data))
        valid[1:] &= follows
        return len(valid) if valid.all() else int(valid.argmin())

    def text_at(self, texts: _Texts, row: int) -> bytes:
        """Return the text of a record."""
        return self.data[texts.begins[row] : texts.ends[row]]

    def _matches(self, at: NDArray[np.int64], literal: bytes) -> NDArray[np.bool_]:
        is_equal = np.ones(len(at), bool)
        for first in range(0, len(literal), 8):
            part = literal[first : first + 8]
            words = self._words[at + first]
            if len(part) < 8:
                words &= _MASKS[len(part)]
            is_equal &= words == np.uint64(int.from_bytes(part, "little"))
        return is_equal

    def literal(self, literal: bytes) -> None:
        """Move over these bytes."""
        self.is_valid &= self._matches(self.at, literal)
        self.at = self.at + len(literal)

    def number(self, name: str) -> None:
        """Move over an integer from 0 on, or None."""
        # All of these methods move every cursor, also those that are not valid any more: a mask would cost more than it
        # saves. Padding keeps them inside.
        is_none = self._bytes[self.at] == _NONE
        values, nbytes, is_number = self._integers()
        self.is_valid &= is_number | is_none
        if name != "index":  # it is a hint for torch alone
            self.numbers[name] = _narrow(np.where(is_none, -1, values))
        self.at = self.at + np.where(is_none, 1, nbytes)

    def _integers(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Return the integer at each cursor, its bytes with the opcode, and whether there is one from 0 on."""
        words = self._words[self.at]
        codes = self._bytes[self.at]
        widths = _WIDTHS[codes]
        values = ((words >> np.uint64(8)) & _MASKS[widths.clip(0)]).astype(np.int64)
        is_number = (widths > 0) & (values < 1 << 31)
        is_long = codes == _LONG1
        if is_long.any():
            lengths = np.where(is_long, values, 0).clip(0, _MOST_LONG_BYTES)
            longs = ((words >> np.uint64(16)) & _MASKS[lengths]).astype(np.int64)
            # Positive, as the pickler writes it: the highest bit is the sign.
            is_right = (values == lengths) & (lengths > 0) & (longs >> (8 * lengths - 1).clip(0) == 0)
            values, widths = np.where(is_long, longs, values), np.where(is_long, lengths + 1, widths)
            is_number &= ~is_long | is_right
        return values, widths + 1, is_number

    def size(self, name: str) -> None:
        """Move over a torch.Size behind the reference to its class, or over None."""
        # A tuple of up to 3 items has an opcode of its own; a longer one lies above a mark.
        is_marked = self._bytes[self.at] == _MARK
        self.at = self.at + is_marked
        dims = np.zeros(len(self.at), np.int8)
        is_inside = np.ones(len(self.at), bool)
        columns = []
        for _ in range(_MAX_DIMS):
            is_inside &= _WIDTHS[self._bytes[self.at]] > 0
            if not is_inside.any():
                break
            values, nbytes, is_number = self._integers()
            self.is_valid &= is_number | ~is_inside
            columns.append(np.where(is_inside, values, 0))
            self.at = self.at + np.where(is_inside, nbytes, 0)
            dims += is_inside
        # The opcode must fit the mark: TUPLE without one would take what lies below on the machine's stack, too.
        self.is_valid &= (self._bytes[self.at] == _TUPLES[dims]) & (is_marked == (dims > 3))
        self.at = self.at + 1
        is_memoized = self._bytes[self.at] == _MEMOIZE  # not the empty tuple, of which Python has one object
        self.at = self.at + is_memoized
        self.memoized += is_memoized
        self.literal(_SIZE_END)
        self.memoized += 2
        self.dims[name] = dims
        self.sizes[name] = _narrow(np.stack(columns, 1)) if columns else np.zeros((len(dims), 0), np.int32)

    def text(self, name: str) -> None:
        """Move over a text that is written here, or a reference to one."""
        # Texts of 256 bytes and more have another opcode, and are for the machine.
        codes, lengths = self._bytes[self.at], self._bytes[self.at + 1].astype(np.int64)
        is_inline, is_short = codes == _SHORT_TEXT, codes == ord("h")
        references = np.where(is_short, lengths, (self._words[self.at] >> np.uint64(8)).astype(np.int64) & 0xFFFFFFFF)
        begins = self.at + 2
        ends = begins + lengths
        self.texts[name] = _Texts(begins, ends, np.where(is_inline, -1, references), self.memoized.copy())
        self.is_valid &= np.where(is_inline, self._bytes[ends] == _MEMOIZE, is_short | (codes == ord("j")))
        self.memoized += is_inline
        self.at = self.at + np.where(is_inline, 3 + lengths, np.where(is_short, 2, 5))
