"""The versions that the readers of one host have staged: whole checkpoints in a local directory that they share.

``<cache>/weight_v000012-<digest of its manifest>/`` is a version as a Hugging Face checkpoint. The next version is made
from it and from one delta, so that no chain is read again, and one reader of a host does it for all: the others wait
for the lock. A directory appears when it is whole. It is removed when the next version has been staged, unless a reader
still uses it, which holds a shared lock on ``<name>.used``; the system releases the lock of a reader that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from statexchange.checkpoint.merge import merge_source
from statexchange.checkpoint.publication import listed_files
from statexchange.errors import CorruptError, StallError, StorageError
from statexchange.formats.huggingface import MANIFEST
from statexchange.storage import files, publish
from statexchange.storage.store import local_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statexchange.formats.source import Source

__all__ = ["CachedVersion", "VersionCache"]

_NAME = re.compile(r"weight_v[0-9]{6,12}-([0-9a-f]{32})")
_LOCK, _USED = ".lock", ".used"
_LONGEST_S = 3600.0  # for which a reader waits for another one that stages


class CachedVersion:
    """A staged version that is in use, until `close`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = os.open(f"{path}{_USED}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def close(self) -> None:
        """Let the version be removed."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class VersionCache:
    """A cache of versions in a directory of this host.

    Args:
        path: the directory that the user has chosen; None for one in the host's shared memory, which is emptied when
            its last reader closes it.
        versions: the directory of versions.
    """

    def __init__(self, path: str | None, versions: str) -> None:
        self._is_own = path is None
        self.path = local_path(f"shm://versions-{files.digest(versions.encode())}") if path is None else path

    def copies(self) -> dict[str, str]:
        """Return the paths of the versions that are staged, by the digests of their manifests."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return {}
        return {match[1]: f"{self.path}/{match[0]}" for name in names if (match := _NAME.fullmatch(name)) is not None}

    def stage(
        self,
        name: str,
        key: str,
        open_version: Callable[[Mapping[str, str]], Source],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> CachedVersion:
        """Return a version, which is made unless it is there. Not collective.

        Args:
            name: the name of the version's directory.
            key: the digest of its manifest.
            open_version: opens it, given the versions that are staged.
            on_progress: as for `merge_checkpoint`.

        Raises:
            StallError: another reader of this host has been staging for an hour.
            StateExchangeError: as `merge_checkpoint`.
        """
        files.make_path(self.path, 0o700)
        with files.private_directory(self.path):
            pass
        path = f"{self.path}/{name}-{key}"
        with self._locked():
            cached = CachedVersion(path)
            try:
                if not os.path.isdir(path):
                    self._make(path, open_version, on_progress)
                self._remove_unused(without=path)
            except StorageError as error:
                cached.close()
                raise error.located(advice=f"the versions of this host lie in {self.path}: choose by cache=") from None
            except BaseException:
                cached.close()
                raise
        return cached

    def _make(
        self,
        path: str,
        open_version: Callable[[Mapping[str, str]], Source],
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        copies = self.copies()
        try:
            merge_source(open_version(copies), path, on_progress)
        except CorruptError:
            if not copies:
                raise
            # The copy on this host may be what is broken: once more, from the versions alone.
            merge_source(open_version({}), path, on_progress)

    def close(self) -> None:
        """Empty a cache in shared memory, but for what other readers use."""
        if self._is_own and os.path.isdir(self.path):
            with contextlib.suppress(StallError), self._locked(0.0):
                self._remove_unused()

    @contextlib.contextmanager
    def _locked(self, timeout_s: float = _LONGEST_S) -> Iterator[None]:
        lock = FileLock(f"{self.path}/{_LOCK}", timeout=timeout_s)
        try:
            lock.acquire()
        except Timeout:
            raise StallError("another reader of this host is still staging a version", path=self.path) from None
        try:
            yield
        finally:
            lock.release()

    def _remove_unused(self, without: str = "") -> None:
        """Remove the versions that no reader uses."""
        for path in self.copies().values():
            if path == without:
                continue
            fd = os.open(f"{path}{_USED}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                publish.remove(path, MANIFEST, listed_files)
                os.unlink(f"{path}{_USED}")
            except BlockingIOError:
                continue
            finally:
                os.close(fd)
