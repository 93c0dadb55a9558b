"""Read a workspace as a source: its newest complete round."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    StorageError,
)
from statexchange.formats.source import ShardFile, Source
from statexchange.storage.location import OpenedPath, open_path
from statexchange.storage.steps import step_of
from statexchange.storage.store import Store
from statexchange.storage.workspace import (
    RankName,
    WorkspaceView,
    is_rank_file,
    is_round_name,
    is_run_name,
)

_SHOWN_RANKS = 20


def matches(opened: OpenedPath) -> bool:
    """Whether a path is a workspace, or one run, round or rank's file of it."""
    return is_rank_file(opened.file) if opened.file is not None else _depth(opened) is not None


def _depth(opened: OpenedPath) -> int | None:
    """Return the depth of a directory below a workspace's root: 0 for the root, 1 for a run, 2 for a round."""
    if _is_round(opened.store):
        return 2
    if any(map(_is_round, _below(opened.store, is_round_name))):
        return 1
    for run in _below(opened.store, is_run_name):
        if any(map(_is_round, _below(run, is_round_name))):
            return 0
    return None


def _below(store: Store, matches_name: Callable[[str], bool]) -> Iterator[Store]:
    """Yield the subdirectories whose names match, without those of a job's saves that cannot be read.

    Raises:
        ReplacedError: one was removed meanwhile; there may be a newer one.
        StorageError: one cannot be read.
    """
    for name in filter(matches_name, store.directories):
        try:
            below = store.below(name)
            below.listing  # noqa: B018 (read here, where an error of one that cannot be read is handled)
        except NotFoundError:
            raise ReplacedError("removed while it was opened", path=store.path_of(name)) from None
        except ReplacedError:
            raise
        except StorageError:
            if step_of(name) is None:
                raise
        else:
            yield below


def _is_round(store: Store) -> bool:
    if not is_round_name(store.path.rstrip("/").rpartition("/")[2]):
        return False
    # A writer removes a round when its block ends: an empty listing may be that of what is no longer there.
    if not store.listing and not store.is_current():
        raise ReplacedError("removed while it was opened", path=store.path)
    return any(map(is_rank_file, store.listing))


def read(opened: OpenedPath) -> Source:
    """Return the source at a path.

    Raises:
        IncompleteError: ranks are missing; the message lists them.
        ReplacedError: the round was removed meanwhile, so that another one is the newest.
    """
    # A run or a round is read by way of the workspace's root, which is opened again for it: then this path is closed.
    root, run, number = position(opened)
    try:
        view = WorkspaceView(root.store)
        if opened.file is not None:
            names: Sequence[RankName] = [RankName.parse(os.path.join(str(run), f"{number:06d}", opened.file))]
        else:
            names = _choose(view, run, number)
        return _read(root, view, names, whole_round=opened.file is None)
    except BaseException:
        root.close()
        raise
    finally:
        if root is not opened:
            opened.close()


def position(opened: OpenedPath) -> tuple[OpenedPath, str | None, int | None]:
    """Return the workspace's opened root, and the run and round that `opened` stands for.

    Raises:
        InvalidArgumentError: a rank's file is not in a round's directory.
    """
    if opened.file is not None:
        folder, number = os.path.split(opened.store.path)
        root, run = os.path.split(folder)
        if not is_round_name(number) or not is_run_name(run):
            text = "a rank's file can only be read where it was written, in <workspace>/<run>/<round>"
            raise InvalidArgumentError(text, path=os.path.join(opened.store.path, opened.file))
        return open_path(root), run, int(number)
    depth = _depth(opened)
    if depth == 0:
        return opened, None, None
    folder, number = os.path.split(opened.path.rstrip("/"))
    if depth == 1:
        return open_path(folder), number, None
    root, run = os.path.split(folder)
    return open_path(root), run, int(number)


def _read(
    root: OpenedPath,
    view: WorkspaceView,
    names: Sequence[RankName],
    *,
    whole_round: bool,
) -> Source:
    problems: list[StateExchangeError] = []
    shard_files: list[ShardFile] = []
    configs: dict[int, str] = {}
    absent: list[RankName] = []
    for name in names:
        try:
            file = view.open(name)
            shard_files.append(ShardFile.of_rank(file))
            configs[shard_files[-1].rank] = file.config
        except NotFoundError as error:
            absent.append(name)
            problems.append(IncompleteError("this rank's file is missing", rank=error.rank, path=error.path))
        except ReplacedError:
            raise
        except StateExchangeError as error:
            problems.append(error)
    # Files that are listed and absent are a round that its writer has just removed, or files that were lost.
    if absent and view.was_removed(absent):
        raise ReplacedError("this round was removed while it was read", path=root.path)
    if whole_round:
        problems += _missing_ranks(view, names)
    first = names[0]
    return Source(
        "workspace",
        root,
        shard_files,
        run=first.run,
        round=first.round,
        world_size=first.world_size,
        configs=configs,
        problems=problems,
    )


def _choose(view: WorkspaceView, run: str | None, number: int | None) -> Sequence[RankName]:
    """Return the files to read: those of the newest complete round, or without one of the newest."""
    numbers: dict[str, list[int]] = {}  # of the rounds, by their run
    for name in view.runs() if run is None else [run]:
        with suppress(NotFoundError):  # removed meanwhile
            for candidate in view.rounds(name):
                if number in (None, candidate):
                    numbers.setdefault(name, []).append(candidate)
    if len(numbers) > 1:
        shown = ", ".join(os.path.join(view.path, name) for name in numbers)
        raise InvalidArgumentError(f"several runs are in this workspace: open one of {shown}", path=view.path)
    rounds: list[Sequence[RankName]] = []
    for name, of_run in numbers.items():
        for candidate in of_run:
            with suppress(NotFoundError):  # removed meanwhile
                rounds += filter(None, [view.rank_names(name, candidate)])
    if not rounds:
        if view.has_changed:
            raise ReplacedError("its rounds were removed while they were opened", path=view.path)
        text = "no rank has written to this workspace yet: check the path, or wait for the writers"
        raise NotFoundError(text, path=view.path)
    # The newest one may be half written: others of its ranks have not come there yet.
    whole = [names for names in rounds if not _missing_ranks(view, names)]
    return (whole or rounds)[-1]


def _missing_ranks(view: WorkspaceView, names: Sequence[RankName]) -> list[StateExchangeError]:
    """Return the error of a round that does not have exactly one file per rank; [] if it has."""
    first, ranks = names[0], {name.rank for name in names}
    round_path = os.path.join(view.path, os.path.dirname(first.relative))
    if len(ranks) < first.world_size:
        # A file's name may have any world size, so at most as many ranks are counted as are shown.
        absent = list(islice((rank for rank in range(first.world_size) if rank not in ranks), _SHOWN_RANKS))
        more = "" if len(ranks) + len(absent) == first.world_size else " and more"
        text = f"ranks {absent}{more} of {first.world_size} have no file"
        return [IncompleteError(text, rank=absent[0], path=round_path)]
    if len(names) > first.world_size or any(name.world_size != first.world_size for name in names):
        return [CorruptError("files of two attempts are in one round: remove the older ones", path=round_path)]
    return []
