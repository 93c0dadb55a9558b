"""Take versions of weights that a `Publisher` publishes: wait for one, stage it on this host, and load it.

Staging does all that can fail, while the old weights serve: it takes a lease, reads the delta or the newest full
version, and checks all digests. What is left is a load from the host's memory. A reader decides by the manifest of a
version alone, so that what is absent is never taken for unchanged, for full, or for success.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from statexchange.comm.communicator import CommLike, Communicator, from_all, from_root
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.errors import InvalidArgumentError, StallError, excerpt
from statexchange.exchange.load import load_checkpoint
from statexchange.exchange.load_report import LoadReport
from statexchange.exchange.version_cache import VersionCache
from statexchange.exchange.version_reading import (
    NOT_YET,
    Search,
    Version,
    find_version,
    open_leased,
    open_version,
)
from statexchange.formats.registry import open_checkpoint
from statexchange.sharding.options import Convert, Rename, whole_number
from statexchange.state.describe import State
from statexchange.storage.location import is_remote, target_path
from statexchange.storage.versions import version_age, version_name, version_path, versions_path

if TYPE_CHECKING:
    from typing_extensions import Self

    from statexchange.formats.open_checkpoint import OpenCheckpoint

_POLL_S, _LONGEST_POLL_S = 0.05, 1.0


class Subscriber:
    """Takes versions of weights from the directory in which a `Publisher` publishes them, or another program.

    Each rank of an engine has one over the engine's ranks; a process alone needs no torch.distributed. Constructing it
    touches no file and communicates with no rank.

    Staged versions lie in a cache that all readers of a host share. It needs room for two whole models: the staged
    version stays until the next one is complete, which is made from it and from one delta. Where that is too much, as
    for an engine over many hosts, ``cache=False`` reads versions where they lie: each rank only what its own boxes
    need. Then `stage` checks that the version can be opened, and `load_into` reads it with all that it is based on, so
    that a broken byte is found while the state changes.

    Args:
        path: the directory of versions or its fsspec URL; of another program, that of its run.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current communicator.
        cache: a local directory for staged versions, of which the newest stays after `close`. By default one in shared
            memory (/dev/shm), from which `close` removes what no other reader uses; after a kill the newest version
            stays there until a reader of the same directory closes. False for none.

    Raises:
        InvalidArgumentError: an argument is not accepted.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> with sx.Publisher("updates") as publisher:
        ...     report = publisher.publish({"w": torch.ones(3)}, 1)
        >>> weights = {"w": torch.zeros(3)}
        >>> with sx.Subscriber("updates") as subscriber:
        ...     version = subscriber.wait(timeout_s=10)
        ...     with subscriber.stage(version) as staged:
        ...         report = staged.load_into(weights)
        >>> version.number, weights["w"]
        (1, tensor([1., 1., 1.]))
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        comm: CommLike | None = None,
        cache: str | os.PathLike[str] | Literal[False] | None = None,
    ) -> None:
        self._path = versions_path(path)
        self._cache: VersionCache | None = None
        if cache is not False:
            self._cache = VersionCache(None if cache is None else target_path(cache, local=True), self._path)
        self._comm = comm

    @property
    def path(self) -> str:
        """The directory of versions."""
        return self._path

    def wait(
        self, newer_than: Version | None = None, *, version: int | None = None, timeout_s: float = 600.0
    ) -> Version:
        """Return the newest version that is whole on all hosts of the ranks, and newer than another one.

        Collective. A version that is not whole yet is passed over: an older one is returned if that is newer than
        `newer_than`.

        Args:
            newer_than: the version that the caller has. Every version of a later run is newer.
            version: the number that is wanted, to go back to a version that is kept; by default the newest. Not
                together with `newer_than`.
            timeout_s: how long to wait; 0 looks once.

        Returns:
            The version, the same on all ranks.

        Raises:
            StallError: there was none in time; the error says when the last one was published.
            NotFoundError: the version of this number was retired.
            InvalidArgumentError: an argument is not accepted.

        Example:
            >>> import statexchange as sx
            >>> sx.Subscriber("nothing").wait(timeout_s=0)
            Traceback (most recent call last):
            ...
            statexchange.errors.StallError: no version was published within 0 s: the directory does not exist yet [...]
        """
        with public_call("Subscriber.wait"):
            comm = as_communicator(self._comm)
            with comm.phase("checking its options"):
                if newer_than is not None and not isinstance(newer_than, Version):
                    raise InvalidArgumentError(f"newer_than is a Version that wait returned, not {excerpt(newer_than)}")
                number = None if version is None else whole_number(version, "version")
                if newer_than is not None and number is not None:
                    raise InvalidArgumentError("wait takes newer_than or version, not both")
                if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s >= 0:
                    raise InvalidArgumentError(f"timeout_s must be a number of seconds, not {excerpt(timeout_s)}")
            end = time.monotonic() + timeout_s
            pause = _POLL_S
            while True:
                with comm.phase("looking for a version"):
                    # Before the look, so that it is looked once after the end: with timeout_s=0, too.
                    is_late = time.monotonic() >= end
                    # Root alone, whose answer counts for all: each host might see another newest version.
                    search = find_version(self._path, newer_than, number) if comm.rank == 0 else Search()
                    if comm.rank == 0 and search.version is None and is_late:
                        raise self._nothing_new(newer_than, number, timeout_s, search.reason)
                found = from_root(comm, search.version, Version | None, "the version")
                if found is not None and self._is_seen(comm, found):
                    return found
                # Only root's clock counts: ranks that decide by their own would leave the loop in different turns.
                with comm.phase("waiting for a version"):
                    if comm.rank == 0 and found is not None and is_late:
                        text = f"version {found.number} is not whole on all hosts after {timeout_s:g} s"
                        raise StallError(text, path=found.path)
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_POLL_S)

    def _is_seen(self, comm: Communicator, version: Version) -> bool:
        """Whether the first rank of each host sees a whole version. Collective."""
        is_seen = True
        with comm.phase("looking for the version on this host"):
            if comm.local_rank == 0 and comm.rank != 0:  # root has seen it
                try:
                    open_version(self._path, version).close()
                except NOT_YET:
                    is_seen = False
        return all(from_all(comm, is_seen, bool, "whether it sees the version"))

    def _nothing_new(self, newer_than: Version | None, number: int | None, timeout_s: float, reason: str) -> StallError:
        """Return the error for a wait that has ended without a version; `reason`: why the newest does not count."""
        what = "no version"
        if number is not None:
            what += f" {number}"
        if newer_than is not None:
            what += f" newer than {newer_than.number}"
        text = f"{what} was published within {timeout_s:g} s"
        if reason:
            return StallError(f"{text}: {reason}", path=self._path)
        last = find_version(self._path, None, None).version
        if last is None:
            exists = is_remote(self._path) or os.path.isdir(self._path)
            reason = "there is none" if exists else "the directory does not exist"
            return StallError(f"{text}: {reason} yet", path=self._path)
        age_s = version_age(self._path, last.run, last.number)
        if age_s is None:  # removed just now
            return StallError(text, path=self._path)
        return StallError(f"{text}: the last one, {last.number}, is {age_s / 60:.1f} min old", path=last.path)

    def stage(self, version: Version) -> StagedVersion:
        """Make a whole checkpoint of a version on each host, and check all digests meanwhile. Use it in a with block.

        Collective; blocks until all hosts have it. The state of no rank changes. One rank of a host makes it for all
        readers of the host, from the version that is staged there and one delta, or else from the newest full one.

        Args:
            version: what `wait` has returned.

        Returns:
            The staged version, which stays until the end of the block.

        Raises:
            NotFoundError: the version was retired meanwhile: wait for a newer one.
            CorruptError, IncompleteError: the version or one that it is based on is broken.
            StorageError: there is no room for it.

        Example:
            >>> import torch
            >>> import statexchange as sx
            >>> with sx.Publisher("updates") as publisher:
            ...     report = publisher.publish({"w": torch.ones(3)}, 1)
            >>> subscriber = sx.Subscriber("updates")
            >>> with subscriber.stage(subscriber.wait()) as staged:
            ...     staged.tensors()["w"].read().tolist()
            [1.0, 1.0, 1.0]
        """
        with public_call("Subscriber.stage"):
            comm = as_communicator(self._comm)
            staged: tuple[str, bool] | None = None
            with contextlib.ExitStack() as holding:
                with comm.phase("staging a version"):
                    if not isinstance(version, Version):
                        raise InvalidArgumentError(f"stage takes a Version that wait returned, not {excerpt(version)}")
                    if comm.local_rank == 0:
                        staged = self._staged(comm, version, holding)
                # The other ranks of a host find it in the cache, and hold it themselves: any of them may close first.
                with comm.phase("opening the staged version"):
                    path, is_checkpoint = staged or self._staged(comm, version, holding)
                return StagedVersion(version, path, holding.pop_all(), comm, is_checkpoint=is_checkpoint)

    def _staged(self, comm: Communicator, version: Version, holding: contextlib.ExitStack) -> tuple[str, bool]:
        """Return the path of a version, and whether it is a Hugging Face directory there. Not collective.

        The cache of this host makes it, unless it is there; without a cache it is read where it lies.
        """
        if self._cache is None:
            # The lease lasts as long as the staged version, whose bytes are read only when they are loaded.
            with open_leased(self._path, version, holding, {}) as source:
                return version_path(self._path, version.run, version.number), source.kind == "huggingface"
        # What is staged needs no lease any more: it is whole on this host.
        with contextlib.ExitStack() as leases:
            open_with_lease = functools.partial(open_leased, self._path, version, leases)
            name = version_name(version.number)
            return self._cache.stage(name, version.key, open_with_lease, comm.progress, holding), True

    def close(self) -> None:
        """Remove the staged versions of the default cache that no reader uses. Not collective.

        Example:
            >>> import statexchange as sx
            >>> sx.Subscriber("updates").close()
        """
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class StagedVersion:
    """A version that lies whole and checked on this host, or is kept where it lies, until the end of a with block.

    Attributes:
        version: the version.
    """

    def __init__(
        self, version: Version, path: str, holding: contextlib.ExitStack, comm: Communicator, *, is_checkpoint: bool
    ) -> None:
        self.version = version
        self._path = path
        self._holding = holding
        self._comm = comm
        self._is_checkpoint = is_checkpoint
        self._is_closed = False

    def load_into(
        self,
        state: State,
        *,
        layout: Mapping[str, object] | None = None,
        rename: Rename = (),
        convert: Convert | None = None,
        dtype: Literal["state"] | None = None,
        **options: Any,
    ) -> LoadReport:
        """Load the version into `state`, in place: each rank what its own boxes need, from this host's memory.

        Collective; the options, the report and the errors are those of `load_checkpoint`. Where the state has another
        floating dtype than the version, give ``dtype="state"``.

        Example:
            >>> import torch
            >>> import statexchange as sx
            >>> with sx.Publisher("updates") as publisher:
            ...     report = publisher.publish({"w": torch.ones(3)}, 1)
            >>> subscriber = sx.Subscriber("updates")
            >>> with subscriber.stage(subscriber.wait()) as staged:
            ...     staged.load_into({"w": torch.zeros(3)}).nbytes
            12
        """
        return load_checkpoint(
            state,
            self._open_path(),
            comm=self._comm,
            layout=layout,
            rename=rename,
            convert=convert,
            dtype=dtype,
            **options,
        )

    def tensors(self) -> OpenCheckpoint:
        """Return the tensors as a lazy mapping, as `open_checkpoint` does. Not collective.

        Example:
            >>> import torch
            >>> import statexchange as sx
            >>> with sx.Publisher("updates") as publisher:
            ...     report = publisher.publish({"w": torch.ones(3)}, 1)
            >>> subscriber = sx.Subscriber("updates")
            >>> with subscriber.stage(subscriber.wait()) as staged:
            ...     list(staged.tensors())
            ['w']
        """
        return open_checkpoint(self._open_path())

    def directory(self) -> str:
        """Return the path of the version as a Hugging Face directory, for engines that load one. Not collective.

        Example:
            >>> import os
            >>> import torch
            >>> import statexchange as sx
            >>> with sx.Publisher("updates") as publisher:
            ...     report = publisher.publish({"w": torch.ones(3)}, 1)
            >>> subscriber = sx.Subscriber("updates")
            >>> with subscriber.stage(subscriber.wait()) as staged:
            ...     sorted(os.listdir(staged.directory()))
            ['model.safetensors', 'statexchange.json']
        """
        path = self._open_path()
        if not self._is_checkpoint:
            text = "a delta that is not staged is no Hugging Face directory: give the Subscriber a cache"
            raise InvalidArgumentError(text, path=path)
        return path

    def _open_path(self) -> str:
        """Return the path of what is loaded; raise InvalidArgumentError after the end of the block."""
        if self._is_closed:
            raise InvalidArgumentError("this staged version has ended: use it inside its with block")
        return self._path

    def close(self) -> None:
        """Let the version be removed from this host; the end of a with block does the same. Not collective.

        Example:
            >>> import torch
            >>> import statexchange as sx
            >>> with sx.Publisher("updates") as publisher:
            ...     report = publisher.publish({"w": torch.ones(3)}, 1)
            >>> subscriber = sx.Subscriber("updates")
            >>> subscriber.stage(subscriber.wait()).close()
        """
        self._is_closed = True
        self._holding.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
