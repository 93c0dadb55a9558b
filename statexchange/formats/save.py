"""Read the directory of one save, or one rank's file of it, as a source."""

from __future__ import annotations

from statexchange.errors import IncompleteError, NotFoundError, ReplacedError, StateExchangeError
from statexchange.formats.source import ShardFile, Source
from statexchange.formats.workspace import shard_file
from statexchange.storage.opened_path import OpenedPath
from statexchange.storage.save_directory import MANIFEST, open_rank_file, rank_of_file, read_manifest

__all__ = ["matches", "read"]


def matches(opened: OpenedPath) -> bool:
    """Whether a path is the directory of a save, or a rank's file in one."""
    is_part = opened.file is None or rank_of_file(opened.file) is not None
    return is_part and opened.store.listing.get(MANIFEST) == "file"


def read(opened: OpenedPath, *, strict: bool = True) -> Source:
    """Return the source at a path.

    Raises:
        IncompleteError: a rank's file is missing.
        CorruptError: the manifest or a header is broken.
    """
    manifest = read_manifest(opened.store)
    problems: list[StateExchangeError] = []
    files: list[ShardFile] = []
    configs: dict[int, str] = {}
    for rank, name in enumerate(manifest.files):
        if opened.file not in (None, name):
            continue
        try:
            file = open_rank_file(opened.store, manifest, rank)
            files.append(shard_file(file))
            configs[rank] = file.config
        except NotFoundError as error:
            problems.append(IncompleteError(error.message, rank=rank, path=error.path))
        except ReplacedError:
            raise
        except StateExchangeError as error:
            problems.append(error)
    if problems and strict:
        raise problems[0]
    return Source(
        "save",
        opened,
        tuple(files),
        run=manifest.job,
        step=manifest.step,
        created=manifest.created,
        metrics=manifest.metrics,
        world_size=manifest.world_size,
        configs=configs,
        problems=tuple(problems),
    )
