"""The versions that the readers of one host have staged: whole checkpoints in a local directory that they share.

``<cache>/weight_v000012-<digest of its manifest>/`` is a version as a Hugging Face checkpoint. The next version is made
from it and from one delta, so that no chain is read again, and one reader of a host does it for all: the others wait
for the lock. A directory appears when it is whole. It is removed when the next version has been staged, unless a reader
still uses it, which holds a shared lock on ``<name>.used``; the system releases the lock of a reader that has ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from statexchange.checkpoint.merge import copy_source
from statexchange.checkpoint.publication import ReplaceableFiles
from statexchange.errors import CorruptError, IncompleteError, NotFoundError, StateExchangeError, StorageError
from statexchange.formats.model_files import MANIFEST
from statexchange.storage import files, publish
from statexchange.storage.store import local_path
from statexchange.storage.versions import VERSION_PREFIX

if TYPE_CHECKING:
    from collections.abc import Mapping

    from statexchange.formats.source import Source

_NAME = re.compile(r"weight_v[0-9]{6,12}-([0-9a-f]{32})")
_LOCK, _USED = ".lock", ".used"
_POLL_S = 0.1
_CLOSE_S = 5.0  # for which a reader that closes waits for others, which may have passed over its version


def _in_use(path: str) -> int:
    """Return a descriptor whose lock keeps a staged version from being removed until it is closed."""
    # A lock and no count of readers in a file: the system takes it back from a reader that is killed.
    fd = os.open(f"{path}{_USED}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


class VersionCache:
    """A cache of versions in a directory of this host.

    Args:
        path: the directory that the user has chosen; None for one in the host's shared memory, from which `close`
            removes what no reader uses.
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
        progress: Callable[[], object],
        holding: contextlib.ExitStack,
    ) -> str:
        """Return the path of a version, which is made unless it is there. Not collective.

        Args:
            name: the name of the version's directory.
            key: the digest of its manifest.
            open_version: opens it, given the versions that are staged.
            progress: called again and again.
            holding: at its end the version may be removed.

        Raises:
            StateExchangeError: as `merge_checkpoint`.
        """
        path = f"{self.path}/{name}-{key}"
        with self._storage_errors():
            files.make_path(self.path, 0o700)
            with files.private_directory(self.path):
                pass
            # First in use, then looked for: what is found is not removed after that.
            holding.callback(os.close, _in_use(path))
            if os.path.isdir(path):  # and it stays, as it is in use now
                return path
            with self._locked(progress):
                # Once more: the reader that has removed the version may have removed the locked file, too.
                holding.callback(os.close, _in_use(path))
                if not os.path.isdir(path):
                    # What killed readers of this host have left takes the room of a model.
                    publish.clear_all(self.path, VERSION_PREFIX, MANIFEST)
                    self._make(path, open_version, progress)
                self._remove_unused(without=path)
        return path

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        """Raise StorageError for what the system refuses in the cache itself."""
        try:
            yield
        except OSError as error:
            if isinstance(error, StateExchangeError):
                raise
            raise StorageError.of(error, "use the cache of versions", path=self.path) from error

    def _make(
        self, path: str, open_version: Callable[[Mapping[str, str]], Source], progress: Callable[[], object]
    ) -> None:
        def on_progress(_done: int, _total: int) -> None:
            progress()

        copies = self.copies()
        try:
            copy_source(open_version(copies), path, on_progress)
        except (CorruptError, IncompleteError):
            if not copies:
                raise
            # The copy on this host may be what is broken: once more, from the versions alone.
            copy_source(open_version({}), path, on_progress)
        except StorageError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            advice = f"staged versions need room in {self.path}: choose another directory by Subscriber(cache=...)"
            raise error.located(advice=advice) from None

    def close(self) -> None:
        """Remove what no reader uses from a cache in shared memory; nothing while another reader is staging."""
        if self._is_own and os.path.isdir(self.path):
            lock = self._lock()
            with contextlib.suppress(Timeout), lock.acquire(timeout=_CLOSE_S):
                self._remove_unused()

    def _lock(self) -> FileLock:
        return FileLock(f"{self.path}/{_LOCK}")

    @contextlib.contextmanager
    def _locked(self, progress: Callable[[], object]) -> Iterator[None]:
        """Hold the lock of those that stage; wait for another reader of this host, however long it takes."""
        lock = self._lock()
        while True:
            try:
                lock.acquire(timeout=_POLL_S)
                break
            except Timeout:
                progress()
        try:
            yield
        finally:
            lock.release()

    def _remove_unused(self, without: str = "") -> None:
        """Remove the versions that no reader uses."""
        for name in os.listdir(self.path):
            version = name.removesuffix(_USED)
            path = f"{self.path}/{version}"
            if not name.endswith(_USED) or path == without:
                continue
            fd = os.open(f"{path}{_USED}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                with contextlib.suppress(NotFoundError):
                    publish.remove(path, MANIFEST, ReplaceableFiles())
                # Last: a reader that waits for this lock finds no version, and makes it anew (`stage`).
                os.unlink(f"{path}{_USED}")
            except BlockingIOError:
                continue
            finally:
                os.close(fd)
