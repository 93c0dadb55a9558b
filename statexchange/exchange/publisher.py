"""Publish versions of a trainer's sharded weights in a directory, from which engines and evaluators take them.

The first version of a run is full: an export, as `export_checkpoint` writes it, of which each rank keeps a copy of what
it wrote. The next ones are deltas (version_delta.py): an export, too, of one row of bytes for each tensor that changed.
storage/versions.py says what lies in the directory, formats/version.py what a version is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from statexchange.checkpoint.version_retention import remove_old_versions
from statexchange.comm.communicator import CommLike, Communicator, from_all, from_root
from statexchange.comm.defaults import as_communicator, public_call
from statexchange.errors import InvalidArgumentError, StateExchangeError, excerpt, without_secrets
from statexchange.exchange.background import run_in_background, wait_for_end
from statexchange.exchange.chosen_conversion import Conversion
from statexchange.exchange.export import model_of
from statexchange.exchange.exporting import ExportRequest
from statexchange.exchange.published import PublishedVersion
from statexchange.exchange.version_publishing import (
    PublishReport,
    VersionOptions,
    check_installed,
    publish_version,
)
from statexchange.sharding.options import (
    CallOptions,
    Cast,
    Convert,
    ExportOptions,
    Rename,
    Replicas,
    check_equal_options,
    whole_number,
)
from statexchange.state.describe import Description, State, describe
from statexchange.storage.versions import begin_run, check_is_current, set_latest, versions_path
from statexchange.tensors import collector_paused

if TYPE_CHECKING:
    from typing_extensions import Self

_FRAMES = ("many", "one")
_log = logging.getLogger(__name__)


class Publisher:
    """Publishes versions of sharded weights in a directory, full ones and deltas, without gathering a tensor.

    Engines of other layouts and jobs take them with `Subscriber`; those of slime, miles, sglang, vime and ModelExpress
    read them by their own loaders, at ``path/<run id>``. Constructing it touches no file and communicates with no rank.

    The first version is full. The next is a delta, unless the state's tensors, dtypes, shapes or sharding have changed,
    a sample shows that it would be larger than `max_delta`, the deltas since the last full version are together larger
    than half of one, or `full_every` is reached. Each rank has in its host's memory a copy of its part in the published
    dtype; with ``background=True`` also one in the live dtype.

    Each Publisher is a run of its own. Readers follow the run that began last, so a trainer that starts again may
    number its versions from any number on.

    Args:
        path: a directory that trainer and readers see, which the first publish makes, or an fsspec URL such as
            ``s3://bucket/updates``. To a URL every host uploads what it writes, as in `export_checkpoint`.
        keep: how many of the newest versions stay, and with them all that they are based on. An older one is removed by
            a later publish, at least 60 s after it was retired, and not while a reader has a lease of it.
        full_every: at least each so many versions is full.
        max_delta: the largest delta, as a share of the bytes of all tensors.
        frames: "many" lets each rank compress its own rows. "one" compresses each tensor as one zstd frame, on one
            rank: for readers that decompress one frame alone.
        comm: a Communicator, ProcessGroup, DeviceMesh or MPI communicator; by default the current communicator.
        layout: sharding rules by name pattern, as in `export_checkpoint`; without reductions.
        include: shell patterns of the names to publish, one or several; by default all.
        exclude: shell patterns of the names to leave out.
        rename: a function of a name, or (regex, replacement) pairs, which are applied in order: to the engine's names.
        convert: write the names and values of another model family, as in `export_checkpoint`.
        convert_with: numbers that the conversion needs.
        dtype: the dtype to which floating tensors are cast. In bf16 most steps change few elements; in fp32 nearly all,
            so that deltas do not pay.
        replicas: "equal" raises ReplicaError if copies differ; "root" takes the lowest rank's copy.
        max_shard_size: limit of a file's bytes: an int, or text such as "5GB".
        stall_timeout_s: limit of the time in which no rank moves a byte, in seconds.

    Raises:
        InvalidArgumentError: an argument is not accepted.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> weights = {"w": torch.zeros(1000)}
        >>> with sx.Publisher("updates") as publisher:
        ...     first = publisher.publish(weights, 1)
        ...     weights["w"][7] = 1.0
        ...     second = publisher.publish(weights, 2)
        >>> first.kind, second.kind, second.base_version, second.changed
        ('full', 'delta', 1, 1)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        keep: int = 4,
        full_every: int = 20,
        max_delta: float = 0.6,
        frames: Literal["many", "one"] = "many",
        comm: CommLike | None = None,
        layout: Mapping[str, Any] | None = None,
        include: str | Sequence[str] = (),
        exclude: str | Sequence[str] = (),
        rename: Rename = (),
        convert: Convert | None = None,
        convert_with: Mapping[str, int] | None = None,
        dtype: Cast | None = None,
        replicas: Replicas = "equal",
        max_shard_size: int | str = "5GB",
        stall_timeout_s: float = 300.0,
    ) -> None:
        arguments = locals()
        if frames not in _FRAMES:
            raise InvalidArgumentError(f"frames must be 'many' or 'one', not {excerpt(frames)}")
        if isinstance(max_delta, bool) or not isinstance(max_delta, int | float) or not 0 <= max_delta <= 1:
            raise InvalidArgumentError(f"max_delta must be a number from 0 to 1, not {excerpt(max_delta)}")
        kept, most = whole_number(keep, "keep", least=1), whole_number(full_every, "full_every", least=1)
        self._versions = VersionOptions(versions_path(path), kept, most, float(max_delta), frames)
        self._options = ExportOptions.of(arguments)
        self._call = CallOptions.of(arguments)
        self._comm = comm
        self._published: PublishedVersion | None = None
        self._run = ""  # root's
        self._last: Future[PublishReport] | None = None

    @property
    def path(self) -> str:
        """The directory of versions."""
        return self._versions.path

    @overload
    def publish(self, state: State, version: int, *, background: Literal[False] = False) -> PublishReport: ...

    @overload
    def publish(self, state: State, version: int, *, background: Literal[True]) -> Future[PublishReport]: ...

    def publish(self, state: State, version: int, *, background: bool = False) -> PublishReport | Future[PublishReport]:
        """Publish `state` as the next version; then remove old versions.

        Collective; blocks until the version is published, or in the background until this rank's tensors are copied. A
        publish waits for one in the background, and raises its failure unless `result()` has raised it. A version
        appears when it is whole and durable, or not at all; after a failure the next one is full.

        Args:
            state: a module, a mapping of names to tensors, or a list of such, as in `export_checkpoint`.
            version: its number, the same on all ranks: any for the first of this Publisher, then the last published
                number plus one. After a failed publish its number is used again.
            background: publish a copy in a thread, and return a Future.

        Returns:
            The report, or with `background` a Future of it.

        Raises:
            InvalidArgumentError: `version` is not the next one, or differs between ranks.
            TargetExistsError: another trainer has begun a run in this directory.
            StateExchangeError: as `export_checkpoint`.

        Example:
            >>> import torch
            >>> import statexchange as sx
            >>> publisher = sx.Publisher("updates", dtype=torch.bfloat16)
            >>> publisher.publish({"w": torch.ones(2, 2)}, version=0).nbytes
            8
            >>> publisher.close()
        """
        with public_call("Publisher.publish"):
            comm = as_communicator(self._comm)
            began = time.perf_counter()
            if not background:
                with comm.phase("waiting for the previous version"):
                    wait_for_end(self._last)

            def prepare() -> tuple[Description, Callable[[Description, Communicator], PublishReport]]:
                # Here and not before: in the background the last publish has ended only now.
                number = self._next_number(version)
                options = self._options
                files, conversion = model_of(state, options, comm)
                request = ExportRequest(self.path, options, self._call, files)
                with collector_paused():
                    described = describe(state, options.new_layout(), comm.rank, with_extra_state=False)

                def finish(copies: Description, comm: Communicator) -> PublishReport:
                    timing = (began, background)
                    return self._publish(copies, conversion, request, number, comm, timing)

                return described, finish

            if background:
                shown = os.path.join(self.path, f"version {excerpt(version)}")
                self._last = run_in_background("Publisher.publish", shown, comm, prepare)
                return self._last
            with comm.phase("describing its state"):
                described, finish = prepare()
            return finish(described, comm)

    def _next_number(self, version: object) -> int:
        """Return the number of the next version; raise InvalidArgumentError if that is not `version`."""
        number = whole_number(version, "version")
        last = self._published
        if last is not None and number != last.number + 1:
            text = f"version {last.number + 1} has not been published: publish it before version {number}"
            if number <= last.number:
                text = f"version {number} has been published, or is passed: the next one is {last.number + 1}"
            raise InvalidArgumentError(text, path=self.path)
        if number >= 10**12:  # no name of a version has more digits
            raise InvalidArgumentError(f"version must be below 10**12, not {number}")
        return number

    def _publish(
        self,
        described: Description,
        conversion: Conversion | None,
        request: ExportRequest,
        number: int,
        comm: Communicator,
        timing: tuple[float, bool],
    ) -> PublishReport:
        """Convert and publish described tensors; `timing`: when the call began, and whether it has returned."""
        began, is_background = timing
        # In the background the call has returned when the copy was taken, which was just now.
        stall_s = time.perf_counter() - began
        here = {"version": str(number), "the Publisher": str(self._versions)}
        sent = from_all(comm, here, dict[str, str], "what to publish")
        with comm.phase("comparing what to publish"):
            check_equal_options(sent)
        with comm.phase("beginning a version"):
            check_installed()
            if comm.rank == 0:
                # Not before the first publish: a trainer that fails before it leaves no run behind.
                self._run = self._run or begin_run(self.path)
                check_is_current(self.path, self._run)
        run = from_root(comm, self._run, str, "the run")
        report, published = publish_version(
            comm, described, conversion, request, self._versions, run, number, self._published
        )
        # The version is there: whatever fails from here on, the next one has another number.
        self._published = published
        with comm.phase("removing old versions"):
            if comm.rank == 0:
                self._finish(published)
        seconds = time.perf_counter() - began
        stall_s = stall_s if is_background else seconds
        return replace(report, path=without_secrets(report.path), seconds=seconds, stall_s=stall_s)

    def _finish(self, published: PublishedVersion) -> None:
        """Let ``latest`` name the version, and remove old ones. Root only."""
        # Last of all: readers of other programs that see the name in ``latest`` find a whole version.
        try:
            set_latest(self.path, published.run, published.number)
            remove_old_versions(self.path, published.run, published.bases, self._versions.keep)
        except (StateExchangeError, OSError) as error:  # the version is published all the same
            _log.warning("version %s is published, but not all old versions are removed: %s", published.number, error)

    def close(self) -> None:
        """Wait for a publish in the background, and raise its failure. Not collective.

        Example:
            >>> import statexchange as sx
            >>> sx.Publisher("updates").close()
        """
        wait_for_end(self._last)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:  # else the failure inside the block counts
            self.close()
