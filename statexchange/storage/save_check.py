"""Check the saves in a directory of steps by manifests, file sizes and headers, without reading tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    TruncatedError,
    without_secrets,
)
from statexchange.storage.location import open_path, read_with_retry
from statexchange.storage.publish.claim import claim_of
from statexchange.storage.steps import is_saves_directory, saved_steps, step_name
from statexchange.storage.tensorfile import MANIFEST, SavedFile, SaveManifest, open_rank_file, read_manifest
from statexchange.units import format_ranks

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from statexchange.storage.location import OpenedPath
    from statexchange.storage.store import Store


@dataclass(frozen=True, slots=True)
class SaveCheck:
    """The state of the directory of one step, from its manifest and the sizes and headers of its files.

    Attributes:
        step: the step, by the directory's name.
        path: the directory.
        manifest: the manifest; None if it is missing or broken.
        nbytes: bytes of its files by the manifest, without those that a newer save has too; None without a manifest.
        state: "whole", or in a few words what is wrong.
        problems: an error for each thing that is missing or broken.
    """

    step: int
    path: str
    manifest: SaveManifest | None
    nbytes: int | None
    state: str
    problems: tuple[StateExchangeError, ...]


def list_save_directories(path: str) -> list[int]:
    """Return the steps that have a directory in the directory of saves `path`, oldest first.

    Not collective. Such a directory is a save, unless its content was changed. Unfinished ones at a URL are left out.

    Raises:
        NotFoundError: `path` does not exist, or has neither saves nor unfinished ones.
        InvalidArgumentError: it is one save, or a file.
    """
    with open_path(path) as opened:
        if opened.file is not None:
            raise InvalidArgumentError("a directory of saves is expected, and this is a file", path=path)
        if MANIFEST in opened.store.listing:
            text = f"this is one save: pass the directory that contains it, {os.path.dirname(path)}"
            raise InvalidArgumentError(text, path=path)
        if not is_saves_directory(opened.store):
            text = "there are no saves by step here: pass the directory in which Checkpoints saves"
            raise NotFoundError(text, path=path)
        return saved_steps(opened.store)


def whole_saves(checks: Iterable[SaveCheck]) -> dict[int, SaveManifest]:
    """Return the manifests of the saves without a problem, by step: those that count for what a `Retention` keeps."""
    return {check.step: check.manifest for check in checks if check.manifest is not None and not check.problems}


def check_saves(
    path: str, *, checked: set[tuple[str | int, ...]] | None = None, trusted: Collection[int] = ()
) -> list[SaveCheck]:
    """Look at each save in the directory of saves `path`, oldest first.

    Not collective. Of each file the size and the header are read. A save that is removed meanwhile is left out.

    Args:
        path: the directory.
        checked: the versions of files whose headers were whole at an earlier call, and need not be read again; this
            call adds to it.
        trusted: steps whose headers need not be read, as the caller has just written them.

    Raises:
        NotFoundError: `path` does not exist, or has no saves.
        InvalidArgumentError: it is one save, or a file.
    """
    checks = []
    linked: set[tuple[str | int, ...]] = set()
    seen = set() if checked is None else checked
    # The newest first: what saves share counts for the newest of them.
    for step in reversed(list_save_directories(path)):
        folder = os.path.join(path, step_name(step))
        shown = without_secrets(folder)
        try:
            look = partial(_look, checked=seen, is_trusted=step in trusted)
            manifest, files, problems = read_with_retry(folder, look)
        except NotFoundError:  # removed meanwhile
            continue
        except IncompleteError as error:
            checks.append(SaveCheck(step, shown, None, None, f"no {MANIFEST}", (error,)))
        except CorruptError as error:
            checks.append(SaveCheck(step, shown, None, None, "broken manifest", (error,)))
        except StateExchangeError as error:
            checks.append(SaveCheck(step, shown, None, None, "cannot be read", (error,)))
        else:
            nbytes = manifest.total_bytes
            for identity in files.keys() & linked:
                nbytes -= files[identity]
            linked.update(files)
            errors = tuple(problem.error for problem in problems)
            checks.append(SaveCheck(step, shown, manifest, nbytes, _state(problems), errors))
    return checks[::-1]


# What may be wrong with ranks' files: of one rank, and of several.
_NO_FILE = ("lacks a file", "lack files")
_TRUNCATED = ("is truncated", "are truncated")
_TOO_LONG = ("is longer than listed", "are longer than listed")
_BROKEN = ("has a broken header", "have broken headers")
_UNREADABLE = ("cannot be read", "cannot be read")


@dataclass(frozen=True, slots=True)
class _FileProblem:
    """A problem of a rank's file: in words, of one rank and of several, and as an error."""

    rank: int
    what: tuple[str, str]
    error: StateExchangeError


def _look(
    opened: OpenedPath, checked: set[tuple[str | int, ...]], *, is_trusted: bool
) -> tuple[SaveManifest, dict[tuple[str | int, ...], int], list[_FileProblem]]:
    """Return the manifest of a save, the sizes of its files of frozen parameters by identity, and what is wrong.

    Raises:
        IncompleteError: there is no manifest.
        CorruptError: it is broken.
    """
    with opened:
        try:
            manifest = read_manifest(opened.store)
        except NotFoundError:
            if claim_of(opened.store) is not None:  # at a URL it is being removed or replaced
                raise
            text = f"there is no {MANIFEST} in this step's directory: it is no save any more"
            raise IncompleteError(text, path=opened.path) from None
        problems: list[_FileProblem] = []
        sizes: dict[tuple[str | int, ...], int] = {}
        for number, listed in enumerate(manifest.all_files):
            problem = _file_problem(opened.store, manifest, listed, checked, is_trusted=is_trusted)
            if problem is not None:
                problems.append(problem)
            # Files of frozen parameters come after those of the ranks. Only in a directory have saves one in common.
            elif number >= len(manifest.nbytes) and not opened.store.is_remote:
                sizes[tuple(opened.store.open(listed.name).local_identity)] = listed.nbytes
        # What a save lacks that another job replaces or removes at this moment is no problem of its own.
        if problems and not opened.is_current():
            raise ReplacedError("replaced while it was read", path=opened.path) from problems[0].error
        return manifest, sizes, problems


def _file_problem(
    store: Store,
    manifest: SaveManifest,
    listed: SavedFile,
    checked: set[tuple[str | int, ...]],
    *,
    is_trusted: bool,
) -> _FileProblem | None:
    """Return what is wrong with a rank's file; None if its size is that of the manifest and its header is whole."""
    rank, expected, path = listed.rank, listed.nbytes, store.path_of(listed.name)
    try:
        file = store.open(listed.name)
        size, version = file.size, tuple(file.version)
        if size != expected:
            what = _TRUNCATED if size < expected else _TOO_LONG
            error_type = TruncatedError if size < expected else CorruptError
            error = error_type(f"this rank's file {what[0]}", rank=rank, path=path, expected=expected, found=size)
            return _FileProblem(rank, what, error)
        if version not in checked and not is_trusted:
            open_rank_file(store, manifest, listed)
        # By the version of its file, as a save may be replaced under its name.
        checked.add(version)
    except (NotFoundError, IncompleteError):
        return _FileProblem(rank, _NO_FILE, IncompleteError("this rank's file is missing", rank=rank, path=path))
    except ReplacedError:
        raise
    except CorruptError as error:
        return _FileProblem(rank, _BROKEN, error.located(rank=rank))
    except StateExchangeError as error:
        return _FileProblem(rank, _UNREADABLE, error.located(rank=rank))
    return None


def _state(problems: Sequence[_FileProblem]) -> str:
    """Return the state of a save in a few words: ``rank 3 has no file``."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for problem in problems:
        ranks_of.setdefault(problem.what, []).append(problem.rank)
    parts = []
    for (of_one, of_several), ranks in ranks_of.items():
        if len(ranks) == 1:
            parts.append(f"rank {ranks[0]} {of_one}")
        else:
            parts.append(f"ranks {format_ranks(ranks)} {of_several}")
    return "; ".join(parts) or "whole"
