"""Find the newest step of a run, whose directory a file in the run's directory names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from statexchange.errors import CorruptError, IncompleteError, excerpt
from statexchange.storage.store import Store

_MAX_BYTES = 255  # of the file: no name of a directory is longer
_MAX_LISTED = 8


def named_step(store: Store, tracker: str, directory_of: Callable[[str], str | None]) -> str | None:
    """Return the name of the directory that the file `tracker` means, which need not be there.

    Args:
        store: the run's directory.
        tracker: the file's name.
        directory_of: returns the directory's name for the text in the file; None for a text that means none.
    """
    file = store.open(tracker)
    if file.size > _MAX_BYTES:
        return None
    return directory_of(file.read_all().decode(errors="replace").strip())


def newest_step(
    store: Store, tracker: str, directory_of: Callable[[str], str | None], steps: Callable[[], Sequence[str]]
) -> str:
    """Return the name of the newest step's directory; `steps` returns those of all, for messages.

    Raises:
        CorruptError: the file does not mean a directory.
        IncompleteError: the directory is not there.
    """
    name, path = named_step(store, tracker, directory_of), store.path_of(tracker)
    if name in store.directories:
        return name
    listed = ", ".join(steps()[-_MAX_LISTED:])
    advice = f"give one of the others: {listed}" if listed else "no other is here"
    if name is None:
        raise CorruptError(f"not the name of a step's directory; {advice}", path=path)
    raise IncompleteError(f"{tracker} names the directory {excerpt(name)}, which is not here; {advice}", path=path)
