"""Find the checkpoints below a directory, with the kind of each and whether it is whole.

Only headers, manifests and sizes are read. Links to directories are not followed, and nothing but regular files is
opened.
"""

from __future__ import annotations

import contextlib
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
    StorageError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
    excerpt,
    without_secrets,
)
from statexchange.formats.model_files import unread_weights
from statexchange.formats.registry import UNFINISHED_DOWNLOAD, Probe, probe
from statexchange.formats.source import abbreviated_names
from statexchange.report.hub_metadata import metadata_store
from statexchange.report.summary import model_of, model_rows
from statexchange.report.tensor_facts import tensor_rows, uncovered
from statexchange.storage.files import hidden_target
from statexchange.storage.location import is_remote, resolve_path
from statexchange.storage.steps import step_of
from statexchange.storage.store import local_path

if TYPE_CHECKING:
    from statexchange.formats.source import Source

Status = Literal["whole", "broken", "unfinished", "not checked"]

# By the state of the owner, of a writer and of a removal. Whether one of another host still runs cannot be known.
_UNFINISHED_VERDICTS = {
    "alive": ("BEING WRITTEN", "BEING REMOVED"),
    "dead": ("KILLED WRITER", "KILLED REMOVAL"),
    "unknown": ("UNFINISHED WRITER", "UNFINISHED REMOVAL"),
}
_NUMBERED = re.compile(r"(?:checkpoint|global_step|iter|step)[-_]?([0-9]{1,18})")
_MAX_REASON = 120
_SHOWN_FILES = 2


@dataclass(frozen=True, slots=True)
class ScanRow:
    """A checkpoint, or what a process has left of an unfinished one.

    Attributes:
        path: its directory.
        kind: the format; None if it is unfinished.
        model: the model's class or type, by its config.json.
        step: the training step, of a save, by Trainer's state or by the directory's name.
        num_tensors: number of tensors.
        num_parameters: number of elements of the model's tensors, where it is known which these are; else of all.
        nbytes: bytes of its files.
        modified: when the directory was last changed, in seconds since the epoch; None for a URL.
        verdict: in a few words whether it is whole.
        status: "whole", "broken", "unfinished", or "not checked" of a format that is not read, which `verdict` names.
        problems: an error for each thing that is missing or broken.
    """

    path: str
    kind: str | None = None
    model: str | None = None
    step: int | None = None
    num_tensors: int = 0
    num_parameters: int = 0
    nbytes: int = 0
    modified: float | None = None
    verdict: str = "WHOLE"
    status: Status = "whole"
    problems: tuple[StateExchangeError, ...] = ()


def scan(path: str | os.PathLike[str], *, on_directory: Callable[[str], None] | None = None) -> Iterator[ScanRow]:
    """Yield a row for each checkpoint in a directory or below it, in the order of their paths.

    Not collective. Hidden directories are left out. Reads headers only: `verify` checks the bytes.

    Args:
        path: a directory or an fsspec URL.
        on_directory: called with the path of each directory before it is read.

    Yields:
        The rows. Problems are in the rows, not raised.

    Raises:
        NotFoundError: the path does not exist.
        StorageError: it cannot be read.

    Example:
        >>> import os, numpy
        >>> from safetensors.numpy import save_file
        >>> for name in ("good", "half"):
        ...     os.makedirs(f"models/{name}")
        ...     save_file({"w": numpy.zeros(1000)}, f"models/{name}/model.safetensors")
        >>> os.truncate("models/half/model.safetensors", 4036)
        >>> for row in scan("models"):
        ...     os.path.relpath(row.path), row.num_parameters, row.verdict
        ('models/good', 1000, 'WHOLE')
        ('models/half', 1000, 'TRUNCATED 50 % model.safetensors')
    """
    root = resolve_path(path, "a directory to scan")
    shown, absolute = without_secrets(os.fspath(path)).rstrip("/"), without_secrets(root).rstrip("/")
    # Paths of rows begin as the user wrote the path, which may be relative.
    for row in _walk(root, on_directory):
        modified = row.modified or _modified(row.path)
        yield replace(row, path=shown + without_secrets(row.path).removeprefix(absolute), modified=modified)


def _walk(root: str, on_directory: Callable[[str], None] | None) -> Iterator[ScanRow]:
    """Yield the rows with their absolute paths."""
    # A stack, whose last directory is the first of the alphabet: rows come in the order of their paths.
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        if on_directory is not None:
            on_directory(without_secrets(folder))
        try:
            probed = probe(folder)
        except StateExchangeError as error:  # of a directory that cannot be opened
            if folder == root:
                raise
            if isinstance(error, NotFoundError):  # removed since its parent was listed
                continue
            yield ScanRow(folder, verdict=_verdict([error], folder), status="broken", problems=(error,))
            continue
        with probed:
            row = _with_download(folder, probed, _row(folder, probed))
            if row is not None:
                yield row
            # At a URL an unfinished build has no hidden name.
            if not probed.opened.store.is_remote:
                yield from _unfinished(folder, probed.opened.store.listing)
        if probed.source is not None and probed.source.kind == "workspace":  # its directories are runs and rounds
            continue
        # Directories whose files belong to this checkpoint hold no other one.
        parts = {path.partition("/")[0] for path in _paths_below(folder, probed)}
        for name in reversed(probed.directories):
            if not name.startswith(".") and name not in parts:
                waiting.append(f"{folder.rstrip('/')}/{name}")


def _paths_below(folder: str, probed: Probe) -> list[str]:
    """Return the paths, from a directory on, of the files of the checkpoint in it and of those with problems."""
    paths: list[str | None] = []
    if probed.error is not None:
        paths.append(probed.error.path)
    if probed.source is not None:
        paths += map(attrgetter("path"), (*probed.source.files, *probed.source.problems))
    prefix = f"{folder.rstrip('/')}/"
    return [path.removeprefix(prefix) for path in paths if path is not None and path.startswith(prefix)]


def _row(folder: str, probed: Probe) -> ScanRow | None:
    source, error = probed.source, probed.error
    if error is not None:
        row = ScanRow(folder, step=_step_of(folder, probed), problems=(error,))
        # There may be several checkpoints, of which one has to be named, or a format that is not read.
        if probed.is_foreign or isinstance(error, InvalidArgumentError):
            return replace(row, verdict=f"NOT CHECKED: {_reason(error)}", status="not checked")
        return replace(row, verdict=_verdict([error], folder), status="broken")
    if source is None:
        return None
    rows = tensor_rows(source)
    problems = (*source.problems, *source.empty_weights(), *uncovered(source))
    row = ScanRow(
        path=folder,
        kind=source.kind,
        model=model_of(source),
        step=_step_of(folder, probed),
        num_tensors=len(rows),
        num_parameters=sum(row.num_parameters for row in model_rows(source, rows)),
        nbytes=source.nbytes,
        problems=problems,
    )
    if problems:
        nbytes = _size_of_files(folder, source, probed)
        return replace(row, nbytes=nbytes, verdict=_verdict(problems, folder), status="broken")
    unread = unread_weights(probed.opened.store, {file.name for file in source.files})
    if unread:
        return replace(row, verdict=f"{row.verdict}, {unread[0].partition(';')[0]}")
    return row


def _with_download(folder: str, probed: Probe, row: ScanRow | None) -> ScanRow | None:
    """Return the row of a directory with an unfinished download of huggingface_hub; `row` itself without one.

    The hub's files have the ending ``.incomplete`` while they are written, in the directory of its cache or, for a
    download into a directory, in a hidden one below it, where an old one may be left beside a whole checkpoint.
    """
    listing = probed.opened.store.listing
    names = []
    for name in listing:
        # An old attempt may be left beside the file of a later one.
        if name.endswith(UNFINISHED_DOWNLOAD) and name.removesuffix(UNFINISHED_DOWNLOAD) not in listing:
            names.append(name)
    if row is None or row.status != "whole" or row.kind == "torch":  # nothing lists torch's files
        # Below the directory, it may be removed meanwhile, or unreadable.
        with contextlib.suppress(StateExchangeError):
            store = metadata_store(probed.opened.store)
            if store is not None:
                for name in store.files:
                    if name.endswith(UNFINISHED_DOWNLOAD):
                        names.append(name)
    if not names:
        return row
    verdict = "UNFINISHED DOWNLOAD"
    if row is not None and row.status == "broken":
        verdict += f": {row.verdict}"
    return replace(row or ScanRow(folder), verdict=verdict, status="unfinished")


def _size_of_files(folder: str, source: Source, probed: Probe) -> int:
    """Return the bytes of a broken checkpoint's files, also of those beside them that cannot be read."""
    total = source.nbytes
    read = {file.path for file in source.files}
    for name in probed.opened.store.files:
        if not name.endswith(".json") and f"{folder.rstrip('/')}/{name}" not in read:
            with contextlib.suppress(StateExchangeError):
                total += probed.opened.store.open(name).size
    return total


def _modified(folder: str) -> float | None:
    if is_remote(folder):
        return None
    try:
        return os.stat(local_path(folder)).st_mtime
    except OSError:  # removed meanwhile
        return None


def _step_of(folder: str, probed: Probe) -> int | None:
    """Return the step of a save, or the number in a directory's name such as ``checkpoint-500``.

    The directory is this one, or the one below that is read: a run's directory names its newest step.
    """
    if probed.source is not None and probed.source.step is not None:
        return probed.source.step
    # As global_step_20/actor/model.pt of verl, below the run's directory
    below = next(iter(_paths_below(folder, probed)), "")
    for name in (os.path.basename(folder), below.partition("/")[0]):
        match = _NUMBERED.fullmatch(name)
        if match is not None:
            return int(match[1])
    return None


def _verdict(problems: Iterable[StateExchangeError], folder: str) -> str:
    """Return in a few words what is wrong with the checkpoint in a folder."""
    # Dicts in place of sets, whose order would change from one process to the next
    missing: dict[str, None] = {}
    shares: list[str] = []
    reasons: dict[str, None] = {}
    for problem in problems:
        path = problem.path or folder
        name = file = _name_below(path, folder)
        if name:
            file = f" {abbreviated_names([name])}"
        if isinstance(problem, TruncatedError):
            shares.append(f"{_share(problem)}{file}")
        elif name and isinstance(problem, IncompleteError | NotFoundError) and not _exists(path):
            missing[name] = None
        else:
            reasons[f"{_word(problem)}{file}: {_reason(problem)}"] = None
    parts = []
    if missing:
        # A checkpoint without its index or .metadata was never finished; without weights it has lost some.
        is_listing = all(os.path.basename(name).startswith(".") or name.endswith(".json") for name in missing)
        word = "NO" if is_listing else "MISSING"
        parts.append(f"{word} {abbreviated_names(list(missing), _SHOWN_FILES)}")
    if len(shares) == 1:
        parts.append(f"TRUNCATED{shares[0]}")
    elif shares:
        parts.append(f"TRUNCATED: {len(shares)} files")
    return "; ".join([*parts, *list(reasons)[:1]])


def _exists(path: str) -> bool:
    """Whether a path that a problem names exists: it lacks something then, and is not missing."""
    return not is_remote(path) and os.path.exists(local_path(path))


def _reason(problem: StateExchangeError) -> str:
    """Return the message, or its first words that fit and an ellipsis: info shows all of it."""
    message = excerpt(problem.message.removeprefix("refused: "), 10 * _MAX_REASON)[1:-1]
    return textwrap.shorten(message, _MAX_REASON, placeholder=" ...")


def _name_below(path: str, folder: str) -> str:
    """Return a path below a folder from there on, the last name of any other path, "" for the folder itself."""
    folder = folder.rstrip("/")
    if path == folder:
        return ""
    if path.startswith(f"{folder}/"):
        return path.removeprefix(f"{folder}/")
    return os.path.basename(path)


def _share(error: TruncatedError) -> str:
    if isinstance(error.expected, int) and isinstance(error.found, int) and error.expected > 0:
        return f" {100 * error.found // error.expected} %"
    return ""


def _word(problem: StateExchangeError) -> str:
    if isinstance(problem, UnsafeError | UnsupportedError):
        return "REFUSED"
    if isinstance(problem, StorageError):
        return "UNREADABLE"
    if isinstance(problem, CorruptError):
        return "CORRUPT"
    return "INCOMPLETE"


def _unfinished(folder: str, names: Iterable[str]) -> Iterator[ScanRow]:
    """Yield a row for each process that has files under hidden names of unfinished checkpoints in a directory."""
    targets = sorted(set(filter(None, map(hidden_target, names))))
    if not targets:
        return
    from statexchange.storage.publish.directory_removal import (
        unfinished_builds,
    )  # only here: readers need no file locks

    for name in targets:
        path = f"{local_path(folder).rstrip('/')}/{name}"
        for build in unfinished_builds(path):
            if build.paths:
                yield ScanRow(
                    path,
                    step=step_of(name),
                    nbytes=build.nbytes,
                    modified=_modified(build.paths[0]),
                    verdict=_UNFINISHED_VERDICTS[build.state][build.is_removal],
                    status="unfinished",
                )
