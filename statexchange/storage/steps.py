"""A directory of saves by step: list the whole ones, remove one, and clean up after killed processes.

The save of step 700 is the directory ``step-000000700``. It is published and removed like a checkpoint. In a local
directory (directory_build.py) a directory of that name is whole. At a URL (object_build.py) it is whole if it has a
manifest; one with a claim and without a manifest is unfinished, or is being removed.

A job that loads an earlier step, and then saves one that is not beyond all later saves, leaves these behind. Each save
that it makes from then on, over restarts, names their ids as superseded. They are whole, but count as older than all
others: by steps alone, the next start would load one of them, and the saves that the job makes would be the first to
be removed. A load alone supersedes nothing, as a job may look at an earlier save and go on from its newest one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from statexchange.errors import (
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    ReplacedError,
    StateExchangeError,
    StorageError,
    excerpt,
)
from statexchange.storage import files, publish
from statexchange.storage.atomic import is_temporary, remove_abandoned
from statexchange.storage.location import (
    directory_of,
    is_remote,
    open_path,
    read_with_retry,
    resolve_path,
)
from statexchange.storage.numbered_names import NumberedNames
from statexchange.storage.publish.claim import CLAIM_NAME
from statexchange.storage.tensorfile import MANIFEST, SaveManifest, is_stray, read_manifest, removable_files

if TYPE_CHECKING:
    from collections.abc import Collection, Container, Iterable, Mapping

    from statexchange.storage.location import OpenedPath
    from statexchange.storage.publish.build import UnfinishedBuild
    from statexchange.storage.store import Store

_log = logging.getLogger(__name__)
MAX_STEP = 10**18 - 1
_MAX_SHOWN = 8  # steps in a message
_STEPS = NumberedNames("step-", 9, 18)
step_name = _STEPS.name
"""Return the name of a step's directory."""
step_of = _STEPS.number
"""Return the step of a directory's name; None for any other name."""
_HIDDEN = re.compile(r"\.(step-[0-9]{9,18})\..+")


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule for the saves that stay: the newest, those at multiples of a step, and the best by a metric.

    Attributes:
        keep: number of the newest saves that stay; None keeps all.
        keep_every: saves at multiples of this step stay.
        best: a metric and "min" or "max"; the save with the best value stays.
    """

    keep: int | None = None
    keep_every: int | None = None
    best: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("keep", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidArgumentError(
                    f"{name} must be a whole number of at least 1, or None, not {excerpt(value)}"
                )
        best: Any = self.best
        is_pair = isinstance(best, tuple | list) and len(best) == 2 and isinstance(best[0], str)
        if best is not None and not (is_pair and best[1] in ("min", "max")):
            text = f"best must be a metric's name and 'min' or 'max', as ('loss', 'min'), not {excerpt(best)}"
            raise InvalidArgumentError(text)

    def obsolete(self, saves: Mapping[int, SaveManifest]) -> list[int]:
        """Return the steps of the saves that do not stay, in ascending order."""
        kept = self.reasons(saves)
        return [step for step in sorted(saves) if step not in kept]

    def reasons(self, saves: Mapping[int, SaveManifest]) -> dict[int, str]:
        """Return the reasons to keep each save that stays, by step."""
        steps = sorted(saves)
        superseded = superseded_saves(saves)
        # Superseded saves are older than all others: saves of higher steps that the job has left behind would otherwise
        # push out those that it makes now.
        by_age = sorted(steps, key=lambda step: (saves[step].save not in superseded, step))
        newest = set(steps if self.keep is None else by_age[-self.keep :])
        best = self.best_step(saves)
        kept = {}
        for step in steps:
            reasons = []
            if step in newest:
                reasons.append("newest" if self.keep == 1 else f"one of the newest {self.keep or len(steps)}")
            if self.keep_every is not None and step % self.keep_every == 0:
                reasons.append(f"a multiple of {self.keep_every}")
            if self.best is not None and step == best:
                reasons.append(f"best {self.best[0]}: {saves[step].metrics[self.best[0]]:g}")
            if reasons:
                kept[step] = ", ".join(reasons)
        return kept

    def best_step(self, saves: Mapping[int, SaveManifest]) -> int | None:
        """Return the step of the best save, of several equal ones the highest; None if no save has the metric."""
        if self.best is None:
            return None
        name, direction = self.best
        sign = 1.0 if direction == "max" else -1.0
        ranked = []
        for step, manifest in saves.items():
            # A NaN compares with nothing; and a save whose loss is one is not the best.
            value = manifest.metrics.get(name, math.nan)
            if not math.isnan(value):
                ranked.append((sign * value, step))
        return max(ranked)[1] if ranked else None


def superseded_saves(saves: Mapping[int, SaveManifest | StateExchangeError]) -> set[str]:
    """Return the ids of the saves that one of `saves` supersedes, whether they are there or not."""
    superseded: set[str] = set()
    for manifest in saves.values():
        if isinstance(manifest, SaveManifest):
            superseded.update(manifest.superseded)
    return superseded


def newest_step(saves: Mapping[int, SaveManifest | StateExchangeError]) -> int | None:
    """Return the highest step whose save is not superseded, broken saves included; None without a save."""
    superseded = superseded_saves(saves)
    current = []
    for step, manifest in saves.items():
        if not (isinstance(manifest, SaveManifest) and manifest.save in superseded):
            current.append(step)
    # A save supersedes only older ones, so that one is left; but a manifest that was changed may name all.
    return max(current or saves, default=None)


def saves_path(path: str | os.PathLike[str]) -> str:
    """Return the absolute path or URL of a directory of saves that a caller gave."""
    return directory_of(resolve_path(path, "a directory of saves"))


def steps_text(steps: Iterable[int]) -> str:
    """Return the newest of some steps as text, for a message."""
    numbers = sorted(steps)
    text = ", ".join(map(str, numbers[-_MAX_SHOWN:]))
    if len(numbers) > _MAX_SHOWN:
        text += f" and {len(numbers) - _MAX_SHOWN} older ones"
    return text


def list_steps(store: Store) -> list[int]:
    """Return the steps of a directory whose saves are whole, oldest first. Not collective.

    Raises:
        StorageError: no save is whole as far as can be seen, and the directory of a step cannot be read.
    """
    whole: list[int] = []
    errors: list[StorageError] = []
    for step in named_steps(store):
        names = _names_below(store, step)
        if isinstance(names, StorageError):
            errors.append(names)
        elif MANIFEST in names:
            whole.append(step)
    # One that cannot be read is skipped if others can. Otherwise "no saves here" would be a guess.
    if errors and not whole:
        raise errors[0]
    return whole


def is_saves_directory(store: Store) -> bool:
    """Whether a directory has a whole or unfinished save of a step, or a step's directory that cannot be read.

    Not collective.
    """
    if any(_HIDDEN.fullmatch(name) is not None for name in store.listing):
        return True
    for step in named_steps(store):
        names = _names_below(store, step)
        if isinstance(names, StorageError) or MANIFEST in names or (store.is_remote and CLAIM_NAME in names):
            return True
    return False


def saved_steps(store: Store) -> list[int]:
    """Return the steps whose directories should be saves, oldest first: all that are not known as unfinished.

    Not collective.
    """
    return [step for step in named_steps(store) if not _is_unfinished(store, step)]


def _is_unfinished(store: Store, step: int) -> bool:
    """Whether the directory of a step is an unfinished save or removal: at a URL, one with a claim alone."""
    if not store.is_remote:
        return False
    names = _names_below(store, step)
    return not isinstance(names, StorageError) and CLAIM_NAME in names and MANIFEST not in names


def _names_below(store: Store, step: int) -> Collection[str] | StorageError:
    """Return the names in the directory of a step, or the error if it cannot be read: other steps may be whole."""
    try:
        return store.below(step_name(step)).listing
    except NotFoundError:  # removed meanwhile
        return ()
    except ReplacedError:
        raise
    except StorageError as error:
        return error


def named_steps(store: Store) -> list[int]:
    """Return the steps that have a directory, whole or not, oldest first. Not collective."""
    return _STEPS.numbers(store.directories)


def read_saves(path: str, *, without: Container[int] = ()) -> dict[int, SaveManifest | StateExchangeError]:
    """Return the manifest of each step in the directory `path`, or the error of a broken one; oldest first.

    Not collective. A save that has lost a file is broken, too; sizes and headers are not checked. The steps in
    `without` are left out, and a save that is removed meanwhile. {} if the directory does not exist.

    Raises:
        NotFoundError: `path` is a file, a part of it cannot be a directory, or there is no such bucket.
        StorageError: the directory cannot be read.
    """
    try:
        opened = open_path(path)
    except NotFoundError as error:
        publish.check_can_be_made(path, error)
        return {}
    with opened:
        if opened.file is not None:
            raise NotFoundError("a directory of saves is expected, and this is a file", path=path)
        steps = named_steps(opened.store)
    saves: dict[int, SaveManifest | StateExchangeError] = {}
    for step in steps:
        if step in without:
            continue
        # Each by its own path, which is opened again if another job replaces the save meanwhile.
        try:
            saves[step] = read_with_retry(os.path.join(path, step_name(step)), _manifest_of)
        except NotFoundError:  # removed meanwhile
            continue
        except StateExchangeError as error:
            saves[step] = error
    return saves


def _manifest_of(opened: OpenedPath) -> SaveManifest:
    with opened:
        manifest = read_manifest(opened.store)
        missing = [file.name for file in manifest.all_files if file.name not in opened.store.listing]
    if missing:
        text = f"this save has lost {missing[0]}"
        if len(missing) > 1:
            text += f" and {len(missing) - 1:,} more"
        raise IncompleteError(text, path=opened.store.path)
    return manifest


def check_only_saves(path: str) -> None:
    """Raise InvalidArgumentError if a directory without a save has other content than unfinished saves.

    Not collective. A directory that does not exist is accepted. So are saves: they were published meanwhile; and files
    that a process was killed in writing.
    """
    try:
        with open_path(path) as opened:
            if MANIFEST in opened.store.listing:
                text = f"this is one save: pass the directory that contains it, {os.path.dirname(path)}"
                raise InvalidArgumentError(text, path=path)
            store = opened.store
            unfinished = [step for step in named_steps(store) if _is_unfinished(store, step)]
            names = store.listing.keys() - set(map(step_name, [*list_steps(store), *unfinished]))
    except NotFoundError:
        return
    others = sorted(name for name in names if _HIDDEN.fullmatch(name) is None and not is_temporary(name))
    if others:
        text = f"this directory has no saves by step but other content, such as {others[0]!r}: pass another directory"
        raise InvalidArgumentError(text, path=path)


def remove_save(path: str, step: int, *, waits: bool = True) -> None:
    """Remove the save of a step from the directory `path`.

    Not collective. No reader opens a part of it; one that has opened it before may fail, with an error that it was
    removed. At a URL, if another host's process has begun to remove it, `waits` watches that one's claim for 60 s to
    see whether it still runs.

    Raises:
        NotFoundError: there is no such save.
        UnsafeError: the directory has files that are not of the save.
        TargetExistsError: another process is publishing or removing it.
    """
    publish.remove(os.path.join(path, step_name(step)), MANIFEST, removable_files, waits=waits)


def unfinished_steps(path: str) -> dict[int, list[UnfinishedBuild]]:
    """Return the unfinished saves and removals in the directory `path`, by step.

    Not collective. {} if the directory does not exist.

    Raises:
        StorageError: the directory cannot be read.
    """
    unfinished = {}
    for name in publish.unfinished_names(path, ()):
        step = step_of(name)
        if step is not None:
            builds = publish.unfinished(os.path.join(path, name), MANIFEST)
            if builds:
                unfinished[step] = builds
    return dict(sorted(unfinished.items()))


def clear_leftovers(path: str, *, without: Collection[int] = (), waits: bool = False) -> list[str]:
    """Remove what processes that have provably ended left of unfinished saves and removals. Not collective.

    At a URL also what belongs to a process of another host whose claim this process has seen unchanged for 60 s.

    Args:
        path: the directory of saves.
        without: steps that are known to be whole, at a URL.
        waits: watch the claims of other hosts for 60 s, if they were not seen before.

    Returns:
        The nonces of what was removed at a URL.
    """
    # Builds have their files in directories; beside these lie only owner records that are files (directory_build.py).
    if not is_remote(path):
        with contextlib.suppress(NotFoundError), files.directory(path) as dir_fd:
            remove_abandoned(dir_fd)
    whole = set(map(step_name, without))
    return publish.clear_all(path, _STEPS.prefix, MANIFEST, whole, is_own=is_stray, waits=waits)
