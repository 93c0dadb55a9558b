"""List and check the versions of weights in a directory, as `Publisher` or another program publishes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from statexchange.errors import IncompleteError, NotFoundError, StateExchangeError, without_secrets
from statexchange.formats.registry import open_source
from statexchange.formats.version import delta_facts
from statexchange.report.verify import VerifyReport, verify_listed
from statexchange.storage.location import directory_of, open_path
from statexchange.storage.versions import all_versions, retired_versions, size_and_time, version_path

if TYPE_CHECKING:
    from statexchange.report.value_checks import Check


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version, judged by its manifest or index and by the headers of its files and of those that it is based on.

    Attributes:
        run: the id of the run that published it; "" in a directory of another program.
        version: its number.
        path: its directory.
        kind: "full" or "delta"; None if that cannot be read, like the next two.
        base_version: the version that a delta is based on.
        changed: how many tensors a delta changes.
        nbytes: the bytes of its files.
        created: when it was published, in seconds since the epoch.
        state: "whole", "retired" (about to be removed), "incomplete" or "broken".
        problems: why it cannot be read.
    """

    run: str
    version: int
    path: str
    kind: Literal["full", "delta"] | None = None
    base_version: int | None = None
    changed: int | None = None
    nbytes: int = 0
    created: float | None = None
    state: Literal["whole", "retired", "incomplete", "broken"] = "whole"
    problems: tuple[StateExchangeError, ...] = ()


def list_version_rows(path: str) -> list[VersionRow]:
    """Return a row for each version of each run, the current run last.

    Not collective. Reads manifests, indexes and headers. Problems are in the rows, not raised.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> with sx.Publisher("updates") as publisher:
        ...     reports = [publisher.publish({"w": torch.zeros(9)}, number) for number in (1, 2)]
        >>> [(row.version, row.kind, row.base_version, row.changed, row.state) for row in list_version_rows("updates")]
        [(1, 'full', None, None, 'whole'), (2, 'delta', 1, 0, 'whole')]
    """
    rows = []
    path = directory_of(path)
    for run, numbers in all_versions(path).items():
        retired = retired_versions(f"{path}/{run}")
        for number in numbers:
            # A retired version can still be read: it is removed once no reader has it.
            row = _row(run, number, version_path(path, run, number), is_retired=number in retired)
            if row is not None:
                rows.append(row)
    return rows


def _row(run: str, number: int, path: str, *, is_retired: bool) -> VersionRow | None:
    """Return the row of a version; None if it was removed meanwhile, or has no file."""
    row = VersionRow(run, number, without_secrets(path))
    if is_retired:
        row = replace(row, state="retired")
    try:
        with open_path(path) as opened:
            if not opened.store.listing:
                return None
            nbytes, created = size_and_time(opened.store)
            row = replace(row, nbytes=nbytes, created=created)
            # Opened in full, with all that a delta is based on: a version is whole if a reader can load it now.
            try:
                facts = delta_facts(opened)
                row = replace(row, kind="full")
                if facts is not None:
                    row = replace(row, kind="delta", base_version=facts[0], changed=facts[1])
                open_source(path).close()
            except StateExchangeError as error:
                is_incomplete = isinstance(error, IncompleteError | NotFoundError)
                return replace(row, state="incomplete" if is_incomplete else "broken", problems=(error,))
    except NotFoundError:
        return None
    return row


def verify_versions(
    path: str,
    *,
    checks: Collection[Check] = (),
    on_progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[dict[str, str | int], VerifyReport]]:
    """Read and check every version of weights with all that it is based on.

    Not collective. Problems become findings, not exceptions. A version that is removed meanwhile is left out.

    Args:
        path: the directory of versions.
        checks: the checks of values to make.
        on_progress: called with (bytes done, bytes in total) of each version.

    Yields:
        {"run": the run, "version": the number} and the result of a version.
    """
    path = directory_of(path)
    for run, numbers in all_versions(path).items():
        for number in numbers:
            report = verify_listed(version_path(path, run, number), checks, on_progress)
            # It may be removed while it is read, or what it is based on.
            if report.is_read or number in all_versions(path).get(run, ()):
                yield {"run": run, "version": number}, report
