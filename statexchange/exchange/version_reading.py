"""Find the versions of a directory that are whole where this process looks, and open them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from statexchange.errors import CorruptError, IncompleteError, NotFoundError, ReplacedError, without_secrets
from statexchange.formats import version as version_format
from statexchange.formats.registry import open_with
from statexchange.storage.location import open_path
from statexchange.storage.versions import Lease, list_runs, list_versions, version_path

if TYPE_CHECKING:
    from statexchange.formats.source import Source

# What a reader may see of a version that is whole at the server: NFS shows new entries and sizes with delay.
NOT_YET = (CorruptError, IncompleteError, NotFoundError, ReplacedError)


@dataclass(frozen=True, slots=True)
class Version:
    """A version that is whole where this process has looked.

    Attributes:
        path: its directory.
        run: the id of the run that published it; "" in a directory of another program.
        number: its number in the run.
        key: a digest that differs from that of any other version.
    """

    path: str
    run: str
    number: int
    key: str = field(repr=False, default="")


class Search(NamedTuple):
    """The version that was found, and why the newest one of those that were looked at is not whole; "" if it is."""

    version: Version | None = None
    reason: str = ""


def find_version(path: str, newer_than: Version | None, number: int | None) -> Search:
    """Look for the newest whole version of the newest run that has versions, or for that of a number.

    Not collective. What is not whole is passed over, as it may be only not visible yet, or based on what is lost.

    Args:
        path: the directory of versions.
        newer_than: a version that counts as old, with all before it; versions of a later run are newer.
        number: the number that is wanted.

    Raises:
        NotFoundError: the version of this number is not kept.
    """
    reason = ""
    # The newest run first; "" is the one run of another program's directory.
    for run in reversed(list_runs(path) or [""]):
        numbers = list_versions(path, run)
        candidates = numbers
        if number is not None:
            candidates = [number] if number in numbers else []
        for candidate in reversed(candidates):
            if newer_than is not None and newer_than.run == run and candidate <= newer_than.number:
                break
            version = Version(without_secrets(version_path(path, run, candidate)), run, candidate)
            try:
                # Headers of all files that it is based on are read: what is returned can be staged.
                with open_version(path, version) as source:
                    return Search(replace(version, key=version_format.key_of(source)), reason)
            except NOT_YET as error:
                reason = reason or f"version {candidate} is not whole here: {error}"
        if newer_than is not None and newer_than.run == run:
            break  # versions of earlier runs are older still
        oldest = next((listed for listed in numbers if _has_been_published(path, run, listed)), None)
        if oldest is None:  # a run that has only begun has no version yet: those of the run before it still count
            continue
        if number is not None and number < oldest:
            raise NotFoundError(f"version {number} is not kept: the oldest of this run is {oldest}", path=path)
        break
    return Search(None, reason)


def _has_been_published(path: str, run: str, number: int) -> bool:
    """Whether a listed version is or was whole; an object store lists unfinished ones, too."""
    try:
        with open_path(version_path(path, run, number)) as opened:
            return not version_format.is_unfinished(opened.store)
    except NotFoundError:
        return False


def open_version(path: str, version: Version, copies: Mapping[str, str] = MappingProxyType({})) -> Source:
    """Open a version in the directory `path`; a base of which there is a copy, as `version.read` has it, is read there.

    Not collective.

    Raises:
        IncompleteError, CorruptError: it is not whole.
    """

    def read(opened: Any, *, section: object) -> Source:  # noqa: ARG001 (a version has no sections)
        return version_format.read(opened, copies=copies)

    return open_with(version_path(path, version.run, version.number), read, strict=True)


def open_leased(path: str, version: Version, leases: contextlib.ExitStack, copies: Mapping[str, str]) -> Source:
    """Open a version as `open_version` does, with a lease that ends with `leases`. Not collective.

    Raises:
        NotFoundError: it was retired.
        IncompleteError, CorruptError: it is not whole.
    """
    # The lease first: what is opened before it may be removed while it is read. Bases of a version stay with it.
    leases.callback(Lease(path, version.run, version.number).end)
    return open_version(path, version, copies)
