"""Publish a checkpoint into an object store: every object appears whole, and the manifest, last, says that all do.

A store has no directory to rename. Names that nobody may replace are made exclusively, so of two merges into one target
one is refused; who reads a checkpoint whose manifest is not there yet reads what is being written.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from statexchange.checkpoint.publish import header_of, listed_files
from statexchange.errors import TargetExistsError, UnsafeError
from statexchange.sources.huggingface import MANIFEST
from statexchange.storage import files, object_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from statexchange.layout.plan import FilePlan, TensorPlan

__all__ = ["ObjectPublication", "OpenObject", "check_url"]


def check_url(out: str, *, overwrite: bool) -> None:
    """As `check_target`, for a URL."""
    kind = object_store.kind_of(out)
    names = object_store.names_below(out) if kind == "directory" else [out] if kind else []
    if names and not overwrite:
        raise TargetExistsError("the target exists; overwrite=True (--overwrite) replaces it", path=out)
    strangers = sorted(set(names) - listed_files(out)) if names else []
    if strangers:
        raise UnsafeError(f"refused to overwrite: {strangers[0]!r} is not listed in the target's {MANIFEST}", path=out)


class OpenObject:
    """An output file on its way to a store, written from its begin to its end."""

    def __init__(self, url: str, header: bytes, *, replace: bool, put: Callable[[Callable[[], None]], None]) -> None:
        """`put` is to call what gives the object its name."""
        self.path = url
        self._header = header
        self._put = put
        self._object = object_store.NewObject(url, replace=replace)
        self._object.write(header, 0)

    def offset_of(self, tensor: TensorPlan) -> int:
        """First byte of a tensor in the file."""
        return len(self._header) + tensor.begin

    def write(self, data: files.Buffer, at: int) -> None:
        """The next bytes, which begin at `at`."""
        self._object.write(data, at)

    def finish(self) -> None:
        """Give the object its name."""
        self._put(self._object.finish)

    def close(self) -> None:
        """Drop an object that is not wanted any more."""
        self._object.abandon()


class ObjectPublication:
    """One checkpoint on its way to a URL; constructing it checks the target. Not collective.

    Ends in `commit` or `abandon`; in a with block `abandon` is the default. With `overwrite` the old manifest goes
    before the first object is replaced: from then on until `commit` there is no whole checkpoint.
    """

    def __init__(self, out: str, *, overwrite: bool) -> None:
        self.out = out.rstrip("/")
        self.finished: dict[str, Any] = {}
        check_url(self.out, overwrite=overwrite)
        self._overwrite = overwrite
        self._old = listed_files(self.out) if overwrite else set()
        self._open: list[OpenObject] = []
        self._made: list[str] = []
        self._manifest = b""
        self._is_published = False
        self._lock = threading.Lock()

    def _url(self, name: str) -> str:
        return object_store.join(self.out, name)

    def __enter__(self) -> ObjectPublication:
        return self

    def __exit__(self, *exception: object) -> None:
        self.abandon()

    def create(self, plan: FilePlan) -> OpenObject:
        """A new output file."""
        opened = OpenObject(
            self._url(plan.name),
            header_of(plan),
            replace=self._overwrite,
            put=lambda finish: self._put(plan.name, finish),
        )
        self._open.append(opened)
        return opened

    def _put(self, name: str, put: Callable[[], None]) -> None:
        """Put an object, which is ours from then on."""
        with self._lock:
            if self._old and not self._made:
                object_store.remove(self._url(MANIFEST))
            put()
            self._made.append(name)

    def record(self, name: str, facts: Any) -> None:
        """Nothing: what a killed publisher has put is not taken over."""

    def write_text(self, name: str, data: files.Buffer) -> None:
        """A small object; the manifest waits for `commit`."""
        if name == MANIFEST:
            self._manifest = bytes(data)
            return
        self._put(name, lambda: object_store.put_new(self._url(name), bytes(data), replace=self._overwrite))

    def commit(self) -> None:
        """Put the manifest, unless another publisher has been here; then remove what only the old checkpoint had."""
        object_store.put_new(self._url(MANIFEST), self._manifest)
        self._is_published = True
        for name in self._old - {*self._made, MANIFEST}:
            object_store.remove(self._url(name))

    def abandon(self) -> None:
        """Remove what was made, unless it is published; what was there before stays, even if it was replaced."""
        if self._is_published:
            return
        for opened in self._open:
            opened.close()
        for name in set(self._made) - self._old:
            object_store.remove(self._url(name))
        self._made.clear()
