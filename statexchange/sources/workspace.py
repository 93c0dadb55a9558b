"""A statexchange workspace as a source: the newest committed round, or the newest in which every rank has written."""

from __future__ import annotations

import os
import re

from statexchange.errors import CorruptError, IncompleteError, InvalidArgumentError, NotFoundError, StateExchangeError
from statexchange.sources.base import Extent, Holder, Source, SourceTensor
from statexchange.storage.workspace import MANIFEST, Manifest, RankFile, RankName, Receipt, Workspace, local_path

__all__ = ["read", "recognises"]

_RANK_FILE = re.compile(r"rank-[0-9]{5,}-of-[0-9]{5,}\.[0-9a-f]{16}\.safetensors")
_ROUND = re.compile(r"[0-9]{6,}")


def recognises(path: str) -> bool:
    """Whether `path` is a workspace, or one run or round of it."""
    try:
        return _place(path) is not None or (os.path.isfile(path) and bool(_RANK_FILE.fullmatch(os.path.basename(path))))
    except InvalidArgumentError:
        return False


def _place(path: str) -> tuple[str, str | None, int | None] | None:
    """(root, run, round) that `path` means."""
    root = local_path(path)
    if not os.path.isdir(root):
        return None
    if _is_round(root):
        run = os.path.dirname(root)
        return os.path.dirname(run), os.path.basename(run), int(os.path.basename(root))
    if any(_is_round(os.path.join(root, name)) for name in os.listdir(root)):
        return os.path.dirname(root), os.path.basename(root), None
    nested = (os.path.join(root, run, name) for run in os.listdir(root) if os.path.isdir(os.path.join(root, run)) for name in os.listdir(os.path.join(root, run)))
    return (root, None, None) if any(_is_round(name) for name in nested) else None


def _is_round(path: str) -> bool:
    if not _ROUND.fullmatch(os.path.basename(path)) or not os.path.isdir(path):
        return False
    return any(_RANK_FILE.fullmatch(name) or name == MANIFEST for name in os.listdir(path))


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
    if not os.path.isfile(path):
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
    if os.path.isfile(path):
        folder, file = os.path.split(os.path.abspath(path))
        folder, number = os.path.split(folder)
        root, run = os.path.split(folder)
        return Workspace(root), [RankName.parse(os.path.join(run, number, file))], None
    place = _place(path)
    if place is None:
        raise NotFoundError("no workspace", path=path)
    root, chosen_run, chosen_round = place
    workspace = Workspace(root)
    return workspace, *_choose(workspace, chosen_run, chosen_round)


def _name(receipt: Receipt | RankName) -> RankName:
    return receipt if isinstance(receipt, RankName) else RankName.parse(receipt.relative)


def _choose(workspace: Workspace, run: str | None, number: int | None) -> tuple[list[Receipt] | list[RankName], Manifest | None]:
    """The files to read: of the newest committed round, or without any of the newest whole one."""
    committed = [m for m in workspace.manifests() if run in (None, m.run) and number in (None, m.round)]
    if committed:
        return list(committed[-1].receipts), committed[-1]
    runs = [run] if run is not None else workspace.runs()
    if len(runs) > 1:
        raise InvalidArgumentError(f"several runs lie here, name one of them: {', '.join(runs)}", path=workspace.path)
    rounds = [workspace.rank_names(runs[0], n) for n in workspace.rounds(runs[0]) if number in (None, n)]
    rounds = [names for names in rounds if names]
    if not rounds:
        raise NotFoundError("no rank has written here", path=workspace.path)
    whole = [names for names in rounds if len({n.rank for n in names}) == names[0].world_size]
    return (whole or rounds)[-1], None


def _missing_ranks(workspace: Workspace, names: list[Receipt] | list[RankName], manifest: Manifest | None) -> list[StateExchangeError]:
    if manifest is not None:
        return []
    parsed = [_name(name) for name in names]
    absent = sorted(set(range(parsed[0].world_size)) - {name.rank for name in parsed})
    where = os.path.join(workspace.path, os.path.dirname(parsed[0].relative))
    return [IncompleteError(f"ranks {absent} of {parsed[0].world_size} have no file", rank=absent[0], path=where)] if absent else []


def _holder(file: RankFile) -> Holder:
    tensors = {}
    for name, shard in file.shards.items():
        extents = []
        for index, known in enumerate(file.digests[name]):
            begin, nbytes = file.extent(name, index)
            extents.append(Extent(file.path, begin, nbytes, known))
        tensors[name] = SourceTensor(shard, tuple(extents))
    aliases = file.facts.get("aliases", {})
    if not isinstance(aliases, dict):
        raise CorruptError("broken aliases", path=file.path)
    return Holder(int(file.facts["rank"]), file.path, file.header.nbytes, tensors, aliases)
