"""A workspace as a source: the newest committed round, or the newest in which every rank has written."""

from __future__ import annotations

import contextlib
import os

from statexchange.errors import (
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    StateExchangeError,
)
from statexchange.sources.base import Extent, Holder, Source, SourceTensor
from statexchange.storage import files
from statexchange.storage.object_store import is_url
from statexchange.storage.object_workspace import ObjectWorkspace
from statexchange.storage.workspace import (
    MANIFEST,
    Manifest,
    RankFile,
    RankName,
    Receipt,
    Workspace,
    is_rank_file,
    is_round_name,
    local_path,
)

__all__ = ["read", "recognises"]


def recognises(path: str) -> bool:
    """Whether `path` is a workspace, or one run, round or rank's file of it."""
    return (files.is_file(path) and is_rank_file(os.path.basename(path))) or _place(path) is not None


def _place(path: str) -> tuple[str, str | None, int | None] | None:
    """(root, run, round) that `path` means."""
    root = path.rstrip("/") if is_url(path) else local_path(path)
    if not files.is_directory(root):
        return None
    if _is_round(root):
        run = os.path.dirname(root)
        return os.path.dirname(run), os.path.basename(run), int(os.path.basename(root))
    below = _directories(root)
    if any(_is_round(path) for path in below):
        return os.path.dirname(root), os.path.basename(root), None
    if any(_is_round(path) for run in below for path in _directories(run)):
        return root, None, None
    return None


def _directories(path: str) -> list[str]:
    below = [os.path.join(path, name) for name in files.list_directory(path)]
    return [name for name in below if files.is_directory(name) and not os.path.islink(name)]


def _workspace(root: str) -> Workspace:
    return ObjectWorkspace(root) if is_url(root) else Workspace(root)


def _is_round(path: str) -> bool:
    return is_round_name(os.path.basename(path)) and any(
        is_rank_file(name) or name == MANIFEST for name in files.list_directory(path)
    )


def read(path: str, *, strict: bool = True) -> Source:
    """The source at `path`. Ranks that are missing are an IncompleteError naming them and their files."""
    workspace, names, manifest = _files(path)
    problems: list[StateExchangeError] = []
    holders: list[Holder] = []
    configs: dict[int, str] = {}
    for receipt in names:
        try:
            with workspace.open(receipt) as file:
                holders.append(_holder(file))
                configs[holders[-1].rank] = file.config
        except NotFoundError as error:
            problems.append(IncompleteError("this rank's file is missing", rank=error.rank, path=error.path))
        except StateExchangeError as error:
            problems.append(error)
    if not files.is_file(path):
        problems += _missing_ranks(workspace, names, manifest)
    if problems and strict:
        raise problems[0]
    first = _name(names[0])
    return Source(
        "workspace",
        path,
        tuple(holders),
        run=first.run,
        round=first.round,
        world_size=first.world_size,
        configs=configs,
        problems=tuple(problems),
    )


def _files(path: str) -> tuple[Workspace, list[Receipt] | list[RankName], Manifest | None]:
    """The workspace, its files to read, and the manifest that lists them; of a rank's file only itself."""
    if files.is_file(path):
        folder, file = os.path.split(path if is_url(path) else os.path.abspath(path))
        folder, number = os.path.split(folder)
        root, run = os.path.split(folder)
        return _workspace(root), [RankName.parse(os.path.join(run, number, file))], None
    place = _place(path)
    if place is None:
        raise NotFoundError("no workspace", path=path)
    root, chosen_run, chosen_round = place
    workspace = _workspace(root)
    return workspace, *_choose(workspace, chosen_run, chosen_round)


def _name(receipt: Receipt | RankName) -> RankName:
    return receipt if isinstance(receipt, RankName) else RankName.parse(receipt.relative)


def _choose(
    workspace: Workspace, run: str | None, number: int | None
) -> tuple[list[Receipt] | list[RankName], Manifest | None]:
    """The files to read: of the newest committed round, or without any of the newest whole one."""
    runs = workspace.runs() if run is None else [run]
    places = [(name, n) for name in runs for n in workspace.rounds(name) if number in (None, n)]
    committed = workspace.manifests(places)
    if committed:
        return list(committed[-1].receipts), committed[-1]
    if len({name for name, _ in places}) > 1:
        raise InvalidArgumentError(f"several runs lie here, name one of them: {', '.join(runs)}", path=workspace.path)
    rounds = [names for place in places if (names := _rank_names(workspace, *place))]
    if not rounds:
        raise NotFoundError("no rank has written here", path=workspace.path)
    whole = [names for names in rounds if not _missing_ranks(workspace, names, None)]
    return (whole or rounds)[-1], None


def _rank_names(workspace: Workspace, run: str, number: int) -> list[RankName]:
    with contextlib.suppress(NotFoundError):
        return workspace.rank_names(run, number)
    return []  # removed meanwhile


def _missing_ranks(
    workspace: Workspace, names: list[Receipt] | list[RankName], manifest: Manifest | None
) -> list[StateExchangeError]:
    """What keeps the files of a round from being one of each rank."""
    if manifest is not None:
        return []
    parsed = [_name(name) for name in names]
    first, ranks = parsed[0], [name.rank for name in parsed]
    where = os.path.join(workspace.path, os.path.dirname(first.relative))
    absent = sorted(set(range(first.world_size)) - set(ranks))
    if absent:
        return [IncompleteError(f"ranks {absent} of {first.world_size} have no file", rank=absent[0], path=where)]
    if len(ranks) > first.world_size or any(name.world_size != first.world_size for name in parsed):
        return [CorruptError("two attempts have written into one round", path=where)]
    return []


def _holder(file: RankFile) -> Holder:
    tensors = {}
    for name, shard in file.shards.items():
        extents = []
        for (begin, nbytes), known in zip(file.extents(name), file.digests[name], strict=True):
            extents.append(Extent(file.path, begin, nbytes, known))
        tensors[name] = SourceTensor(shard, tuple(extents))
    aliases = file.facts.get("aliases", {})
    if not isinstance(aliases, dict) or any(not isinstance(kept, str) for kept in aliases.values()):
        raise CorruptError("broken aliases", path=file.path)
    return Holder(int(file.facts["rank"]), file.path, file.header.nbytes, tensors, aliases)
