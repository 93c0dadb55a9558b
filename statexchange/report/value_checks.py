"""Check the values of a checkpoint's tensors while their bytes are read: NaN, infinities, zeros and constants.

A lost write leaves zeros. A client of NFS sends the pages of a file in any order, and a file system may give a file its
size before its bytes. So what a crash or a full server has lost is a run of zero bytes that begins and ends at page
boundaries of the *file*: up to the end of the file or of a tensor (``zero-tail``), or between two pages that did arrive
(``zero-pages``). Runs that are zero for another reason hardly ever have such boundaries.

Zeros and constants are usual in some tensors. The constants below say which, and docs/how-to/inspecting.md tells users.
A person who reads a finding should have a reason to look.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from statexchange.errors import StateExchangeError
from statexchange.report.tensor_facts import element_box
from statexchange.sharding.shards import Box, full_box, index_at
from statexchange.tensors import ITEMSIZE, PACKED, array_over, element_shape, nonfinite
from statexchange.units import format_shape

if TYPE_CHECKING:
    from statexchange.storage.store import ByteRange

Check = Literal["nan", "inf", "all-zero", "zero-tail", "zero-pages", "all-equal"]
CHECKS: tuple[Check, ...] = get_args(Check)

_PAGE_BYTES = 4096  # the least that is lost at once: a page of the client's cache
_ZERO_PAGE, _NONZERO = bytes(_PAGE_BYTES), re.compile(rb"[^\0]")
_MIN_ELEMENTS = 16  # fewer that are all equal say nothing

# By the last part of a name.
_MASK = re.compile("mask", re.IGNORECASE)  # only looked at for NaN
_FLAT_BUFFER = re.compile(r"\.bucket_idx_[0-9]+\.")  # of Megatron, with uninitialised memory between its parameters
_MAY_BE_ZERO = re.compile("bias|beta|mean|shift|offset|zero", re.IGNORECASE)  # if it has one dim
_MAY_BE_EQUAL = re.compile("scale|zero|var|step", re.IGNORECASE)
# Whole rows of these may be zero: the vocabulary is padded, and rows that were never used have no moments.
_VOCABULARY = re.compile(r"embed|vocab|lm_head|(^|\.)(wte|wpe|output)\.|(^|\.)tok_", re.IGNORECASE)
_OPTIMIZER = re.compile(
    r"(^|[._/])(optim(izer)?s?|exp_avg(_sq)?|max_exp_avg_sq|exp_inf|momentum(_buffer)?|square_avg|grad_avg|acc_delta|"
    r"exp_avg_(row|col)|sum)($|[./])"
)


class ValueFindingError(StateExchangeError):
    """A finding of one check in one tensor: an error with the tensor, its rank, and the file with the first element.

    Attributes:
        check: the check.
        region: the block of the tensor in which it was found.
        first: index of the first element that was found.
        count: number of elements that were found.
    """

    code = "FINDINGS"
    attributes = (*StateExchangeError.attributes, "check", "region", "first", "count")

    def __init__(
        self, message: str, *, check: Check, region: Box, first: tuple[int, ...], count: int, **about: Any
    ) -> None:
        super().__init__(message, **about)
        self.check, self.region, self.first, self.count = check, region, first, count

    def __str__(self) -> str:
        return f"{self.check}: {super().__str__()}"


@dataclass(slots=True)
class StoredBox:
    """A box as it lies in a file, with its rank; and the runs of zero bytes in it, by offsets in the file."""

    checks: TensorChecks
    stored: ByteRange
    box: Box
    rank: int | None
    runs: list[tuple[int, int]] = field(default_factory=list)  # of at least a page
    tail: int = 0  # zero bytes up to the last one seen
    num_seen: int = 0  # bytes

    @property
    def end(self) -> int:
        """The offset of its end in the file, in bytes."""
        return self.stored.begin + self.stored.nbytes

    def find_runs(self, data: memoryview) -> None:
        """Find the runs of zero bytes in the next bytes of the file."""
        import numpy as np

        begin = self.stored.begin + self.num_seen
        self.num_seen += len(data)
        if not np.frombuffer(data, np.uint8).any():
            self.tail += len(data)
            return
        # Zeros at both ends first, then those between: a run may go on from the last bytes, or into the next ones.
        octets = bytes(data)  # a memoryview has no `find`
        rest = octets.rstrip(b"\0")
        at = len(octets) - len(octets.lstrip(b"\0"))
        if self.tail + at >= _PAGE_BYTES:
            self.runs.append((begin - self.tail, begin + at))
        self.tail = len(octets) - len(rest)
        # Only runs of a page or more are looked for, so that the search runs in C over all other bytes.
        while (first := rest.find(_ZERO_PAGE, at)) >= 0:
            nonzero = _NONZERO.search(rest, first)
            assert nonzero is not None  # at the latest the last byte of `rest`
            at = nonzero.start()
            self.runs.append((begin + first, begin + at))


@dataclass(slots=True)
class _Special:
    """Elements that are NaN, or infinite: their number, and the first in C order with the box that has it."""

    count: int = 0
    first: tuple[int, ...] | None = None
    where: StoredBox | None = None

    def add(self, mask: Any, window: Box, where: StoredBox) -> None:
        if not mask.any():
            return
        self.count += int(mask.sum())
        # Windows of several ranks' boxes do not come in the order of the tensor.
        first = index_at(int(mask.argmax()), window)
        if self.first is None or first < self.first:
            self.first, self.where = first, where


class TensorChecks:
    """Checks one tensor, box by box, in any order of the boxes. Not thread-safe.

    For each box call `begin`, `add` with all its windows in C order, then `end`; `findings` after the last box. Only
    the first copy of a box is checked here; `verify` compares copies.
    """

    def __init__(self, name: str, dtype: str, shape: tuple[int, ...], checks: Collection[Check]) -> None:
        self._name, self._dtype, self._shape = name, dtype, shape
        self._last_name = name.rpartition(".")[2]
        self._checks = set(checks)
        # -inf, and a constant, are what an attention mask is made of.
        if _MASK.search(self._last_name):
            self._checks &= {"nan"}
        if dtype == "BOOL" or _FLAT_BUFFER.search(name):
            self._checks.clear()
        self._nan, self._inf = _Special(), _Special()
        self._boxes: dict[Box, StoredBox] = {}
        self._value = b""  # of the first element
        self._is_equal = True
        self._is_zero = True

    def begin(self, stored: ByteRange, box: Box, rank: int | None) -> StoredBox | None:
        """Return a box that is read next; None if it need not be read for these checks."""
        if not self._checks or box in self._boxes or not box.numel:
            return None
        return StoredBox(self, stored, box, rank)

    def add(self, stored_box: StoredBox, window: Box, data: memoryview) -> None:
        """Look at the bytes of the box's next window, which is in the tensor's coordinates."""
        import numpy as np

        masks = nonfinite(data, self._dtype)
        if masks is not None:
            self._nan.add(masks[0], window, stored_box)
            self._inf.add(masks[1], window, stored_box)
        if stored_box.stored.strides is None:  # else the bytes do not come in the order of the file
            stored_box.find_runs(data)
        octets, itemsize = np.frombuffer(data, np.uint8), ITEMSIZE[self._dtype]
        if not self._value:
            self._value = bytes(data[:itemsize])
        if self._is_equal:
            # Each element equals the one before it, and the first of them that of the first window.
            is_first = bytes(data[:itemsize]) == self._value
            self._is_equal = is_first and np.array_equal(octets[itemsize:], octets[:-itemsize])
        # By value, as -0.0 is zero. Elements of a packed dtype have no values here.
        if self._is_zero:
            values = octets if self._dtype in PACKED else array_over(octets, self._dtype, (-1,))
            self._is_zero = not values.any()

    def end(self, stored_box: StoredBox) -> None:
        """End a box: all its windows were added."""
        if stored_box.tail >= _PAGE_BYTES:
            stored_box.runs.append((stored_box.end - stored_box.tail, stored_box.end))
        self._boxes[stored_box.box] = stored_box

    def findings(self) -> Iterator[ValueFindingError]:
        """Yield what was found by the checks that are made."""
        for finding in self._all_findings():
            if finding.check in self._checks:
                yield finding

    def _all_findings(self) -> Iterator[ValueFindingError]:
        if not self._boxes:
            return
        whole = full_box(element_shape(self._dtype, self._shape))
        kinds: tuple[tuple[Check, str, _Special], ...] = (("nan", "NaN", self._nan), ("inf", "infinite", self._inf))
        for check, word, special in kinds:
            if special.first is not None and special.where is not None:
                verb = "elements is" if special.count == 1 else "elements are"
                text = f"{special.count:,} of {whole.numel:,} {verb} {word}, the first at {format_shape(special.first)}"
                yield self._finding(check, text, special.where, special.first, special.count)
        if sum(box.numel for box in self._boxes) != full_box(self._shape).numel:
            self._is_zero = self._is_equal = False  # a part was not read, which is another finding
        # One finding for the tensor: that each box ends with zeros follows from it.
        if self._is_zero:
            if not self._may_be_zero():
                yield self._whole("all-zero", "zero", whole)
            return
        if self._is_equal and not self._may_be_equal():
            yield self._whole("all-equal", self._value_text(), whole)
        for stored_box in self._boxes.values():
            runs = []
            for begin, end in stored_box.runs:
                if self._is_usual(stored_box, begin, end):
                    continue
                if end == stored_box.end:
                    yield self._tail(stored_box, begin)
                elif self._is_lost(begin, end):
                    runs.append((begin, end))
            # All runs of a box are one finding: a server that was full may have lost thousands of pages.
            if runs:
                nbytes = sum(end - begin for begin, end in runs)
                text = f"{nbytes:,} bytes"
                if len(runs) > 1:
                    text += f" in {len(runs):,} parts"
                text += " are zero, from a page of the file to another"
                yield self._lost("zero-pages", text, stored_box, runs[0][0], nbytes)

    def _whole(self, check: Check, value: str, whole: Box) -> ValueFindingError:
        where = min(self._boxes.values(), key=lambda stored_box: stored_box.box.offsets)
        return self._finding(check, f"all {whole.numel:,} elements are {value}", where, whole.offsets, whole.numel)

    def _tail(self, stored_box: StoredBox, begin: int) -> ValueFindingError:
        """Return the finding of the zero bytes from byte `begin` of the file to the end of a box."""
        nbytes = stored_box.end - begin
        text = f"the last {nbytes:,} bytes"
        if stored_box.box != full_box(self._shape):
            text += f" of region {element_box(self._dtype, stored_box.box)}"
        text += " are zero"
        if self._begins_page(begin):
            text += ", from a page of the file on"
        return self._lost("zero-tail", text, stored_box, begin, nbytes)

    def _lost(self, check: Check, text: str, stored_box: StoredBox, begin: int, nbytes: int) -> ValueFindingError:
        """Return the finding of zero bytes in a box, the first at byte `begin` of the file."""
        itemsize, box = ITEMSIZE[self._dtype], stored_box.box
        number = -(-(begin - stored_box.stored.begin) // itemsize)  # of the first element that begins there or later
        first = element_shape(self._dtype, index_at(min(number, box.numel - 1), box))
        count = -(-nbytes // itemsize) * PACKED.get(self._dtype, 1)
        text = f"{text}, as after a lost write: {count:,} elements from {format_shape(first)} on"
        return self._finding(check, text, stored_box, first, count, box)

    def _is_usual(self, stored_box: StoredBox, begin: int, end: int) -> bool:
        """Whether a run of zeros is to be expected in this tensor."""
        if self._dtype[0] in "IU" and not self._begins_page(begin):  # counters, and rows of tokens that are padded
            return True
        is_moment = _OPTIMIZER.search(self._name) is not None
        is_whole = end - begin == stored_box.stored.nbytes
        # The moments of a rank's box are all zero before the first step, and of weights that get no gradient.
        if is_whole or not (is_moment or _VOCABULARY.search(self._name)):
            return is_moment and is_whole
        # Whole rows of a vocabulary
        row = full_box(stored_box.box.shape[1:]).numel * ITEMSIZE[self._dtype]
        offsets = (begin - stored_box.stored.begin, end - stored_box.stored.begin)
        return len(stored_box.box.shape) > 1 and offsets[0] % row == offsets[1] % row == 0

    def _begins_page(self, begin: int) -> bool:
        """Whether the first zero element of a run begins a page; the bytes before it may be zero, as of an int 1."""
        return -begin % _PAGE_BYTES < ITEMSIZE[self._dtype]

    def _is_lost(self, begin: int, end: int) -> bool:
        """Whether a run of zeros begins and ends at pages; the element after it may begin with zeros, as 1.0 does."""
        return self._begins_page(begin) and end % _PAGE_BYTES < ITEMSIZE[self._dtype]

    def _says_nothing(self) -> bool:
        """Whether equal elements say nothing: those of integers, or a few."""
        return self._dtype[0] in "IU" or full_box(self._shape).numel < _MIN_ELEMENTS

    def _may_be_zero(self) -> bool:
        if self._says_nothing() or _OPTIMIZER.search(self._name):
            return True
        return self._is_vector() and _MAY_BE_ZERO.search(self._last_name) is not None

    def _may_be_equal(self) -> bool:
        # The bytes of a packed dtype may be equal where its elements are not.
        if self._says_nothing() or self._dtype == "F8_E8M0" or self._dtype in PACKED:
            return True
        if _MAY_BE_EQUAL.search(self._last_name):
            return True
        return self._is_vector() and self._value_text() == "1"

    def _is_vector(self) -> bool:
        # Its largest dim is all that it has: a bias may be kept as [1, 64, 1].
        return max(self._shape, default=1) == full_box(self._shape).numel

    def _value_text(self) -> str:
        value = array_over(self._value, self._dtype, (1,))[0]
        if self._dtype.startswith("C"):
            return f"{complex(value):.6g}"
        return f"{float(value):.6g}"

    def _finding(
        self,
        check: Check,
        text: str,
        where: StoredBox,
        first: tuple[int, ...],
        count: int,
        region: Box | None = None,
    ) -> ValueFindingError:
        """Return a finding, of the whole tensor unless it is of a region."""
        if region is None:
            region = full_box(self._shape)
        shown = element_box(self._dtype, region)
        about = {"name": self._name, "path": where.stored.path, "rank": where.rank}
        return ValueFindingError(text, check=check, region=shown, first=first, count=count, **about)
