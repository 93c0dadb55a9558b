"""Add one file to a directory that exists, or replace it there, so that its name appears only when it is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from statexchange.errors import ReplacedError
from statexchange.storage.atomic import remove_abandoned, write_new
from statexchange.storage.files import check_writable
from statexchange.storage.store import LocalStore

if TYPE_CHECKING:
    from statexchange.storage.publish.objects import Objects
    from statexchange.storage.store import Store

_MODE = 0o666  # reduced by the umask


class AddedFile:
    """A file that will be added to an opened directory.

    Args:
        store: the directory.
        name: the file's name.

    Raises:
        StorageError: this process may not write in the directory.
        UnsupportedError: a URL that cannot be written.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self._objects: Objects | None = None
        # Now, as reading the whole directory for what the file will say may take hours.
        if isinstance(store, LocalStore):
            with store.descriptor() as fd:
                check_writable(fd, store.path)
        else:
            from statexchange.storage.publish.objects import Objects  # imports fsspec, which local paths do not need

            self._objects = Objects(store.address)

    def publish(self, data: bytes, *, overwrite: bool) -> None:
        """Write the file durably; remove temporary files that killed processes have left.

        Raises:
            TargetExistsError: the name exists, unless with `overwrite`.
            ReplacedError: another directory has the path now.
            StorageError: the write failed; nothing is left of it.
        """
        if self._objects is not None:
            self._objects.put(self._name, data, overwrite=overwrite)
            return
        assert isinstance(self._store, LocalStore)
        if not self._store.is_current():
            raise ReplacedError("replaced while it was read", path=self._store.path)
        path = self._store.path_of(self._name)
        # By the descriptor of the directory that was read: one that gets its name from now on does not get the file.
        with self._store.descriptor() as fd:
            remove_abandoned(fd)
            write_new(fd, self._name, data, path=path, mode=_MODE, overwrite=overwrite)
