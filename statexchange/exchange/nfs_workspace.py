"""NFSWorkspace: configs and weights of ranks in a shared directory, without a communicator."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from functools import partial

from statexchange import values
from statexchange.comm import defaults
from statexchange.errors import InvalidArgumentError, NotFoundError, ReplacedError, StateExchangeError, excerpt
from statexchange.exchange.staging import shard_data
from statexchange.processes import process_age_s
from statexchange.settings import check_timeout, detect_launch
from statexchange.state.describe import describe
from statexchange.state.types import Leaf
from statexchange.storage.location import decode_stored
from statexchange.storage.tensorfile import MANIFEST
from statexchange.storage.workspace import RankName, Workspace, WorkspaceView
from statexchange.tensors import from_bytes

_log = logging.getLogger(__name__)
_CLOCK_TICK_S = 0.05  # of a process's age and of file times together
_STABLE_VIEW_S = 5.0  # how long to wait for two equal listings of a directory in which files appear and disappear


class NFSWorkspace:
    """A shared directory in which each rank writes its config and weights for others to read.

    Not collective: no method needs another rank, a collective or a barrier. The interface is that of ModelOpt's
    export/distribute.

    Args:
        workspace_path: the directory or URL; "" is the current directory. With None the workspace is uninitialised,
            and its methods raise InvalidArgumentError, a ValueError.
        run: separates jobs that share a directory: the same on all ranks, and new for each job. By default it is the
            run of this process's communicator, else one that torch's default group shares, else the launcher's job id.
            A reader needs none if the directory holds one run.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> workspace = sx.NFSWorkspace("workspace")
        >>> workspace.write_configs_and_weights({"layers": 2}, {"w": torch.ones(2)})
        >>> config, weights = workspace.read_configs_and_weights_from_rank(0)
        >>> config, weights["w"].tolist()
        ({'layers': 2}, [1.0, 1.0])
    """

    def __init__(self, workspace_path: str | os.PathLike[str] | None = None, *, run: str | None = None) -> None:
        if run is not None and not isinstance(run, str):
            raise InvalidArgumentError(f"run must be text or None, not {excerpt(run)}")
        # ModelOpt's callers pass "" for the current directory, which no other path of ours may be.
        if workspace_path == "":
            workspace_path = os.curdir
        self._workspace: Workspace | None = None
        if workspace_path is not None:
            self._workspace = Workspace(workspace_path)
        self._run = run
        self._is_run_given = run is not None
        self._round: int | None = None
        self._written: tuple[RankName, float] | None = None  # its newest file, and this process's age when it was there

    @property
    def is_initialized(self) -> bool:
        """Whether a path was given."""
        return self._workspace is not None

    def _initialized(self) -> Workspace:
        if self._workspace is None:
            raise InvalidArgumentError("this NFSWorkspace is not initialized: it was given no path")
        return self._workspace

    def write_configs_and_weights(self, config_json: object, weights: Mapping[str, Leaf]) -> None:
        """Write this rank's config and weights as one durable file.

        Not collective. A rank's n-th write is its round n; its last two rounds stay.

        Args:
            config_json: any nesting of dataclasses, dicts, lists, numbers, strings, dtypes and the like.
            weights: tensors by name.

        Raises:
            InvalidArgumentError: no path was given, or the launcher gives this job no id: pass `run`.
            UnsupportedError, StorageError: see `statexchange.errors`.
        """
        workspace = self._initialized()
        rank, world_size = _position()
        run = self._writing_run()
        # Counted from here on: a listing on NFS may lack the round that this rank has just written.
        if self._round is None:
            self._round = workspace.next_round(run, rank)
        else:
            self._round += 1
        shards = shard_data(describe(weights).tensors.values())
        written = workspace.write(
            shards,
            run=run,
            round=self._round,
            rank=rank,
            world_size=world_size,
            config=values.encode(config_json),
        )
        age_s = process_age_s()
        if age_s is not None:
            self._written = written, age_s
        try:
            # A reader may have listed the last round, and opens its file only now.
            workspace.sweep(run, rank, before=self._round - 1)
        except StateExchangeError as error:  # the new round is written all the same; the next write tries again
            _log.warning("cannot remove an old round: %s", error)

    def _writing_run(self) -> str:
        """Return the run of this process; chosen once."""
        if self._run is None:
            runs = _runs_here()
            if not runs and _position()[1] > 1:
                # A random name would give each rank a run of its own, which no reader could put together.
                raise InvalidArgumentError(
                    f"the launcher ({detect_launch().launcher}) gives this job no id of its own: call "
                    "torch.distributed.init_process_group() or statexchange.init() first, or pass run=, which must be "
                    "the same on all ranks and new for each job"
                )
            self._run = runs[0] if runs else f"run-{secrets.token_hex(8)}"
        return self._run

    def read_configs_and_weights_from_rank(
        self,
        target_rank: int,
        *,
        round: int | None = None,  # noqa: A002 (the term of a workspace)
        timeout_s: float = 0.0,
    ) -> tuple[Leaf, dict[str, Leaf]]:
        """Return the config and weights that `target_rank` wrote.

        Not collective; waits at most `timeout_s` for the file. A missing file is an error, never None. If this rank has
        written under a `run` that it was given, a file from before this process began is not taken without `round`: an
        earlier job may have had this run, too.

        Args:
            target_rank: the rank that wrote.
            round: the round to read; by default the rank's newest whole one.
            timeout_s: how long to wait for the file, in seconds.

        Returns:
            The config, and tensors by name on the CPU.

        Raises:
            NotFoundError: the rank's file did not appear; the error names rank and path.
            InvalidArgumentError: several runs are in the directory: pass `run`.
            CorruptError, StorageError: as `statexchange.errors` describes.
        """
        check_timeout(timeout_s, zero=True)
        workspace = self._initialized()
        began = time.monotonic()
        last_observed: object = None
        earlier: RankName | None = None
        while True:
            was_dropped, observed = False, last_observed
            try:
                with workspace.view() as view:
                    name, observed = _find(view, self._run, target_rank, round)
                    earlier = name if round is None and self._is_of_earlier_job(view, name) else None
                    if name is not None and earlier is None:
                        was_dropped = True  # unless `_read` returns
                        return _read(view, name)
            except ReplacedError:
                was_dropped = True
            except NotFoundError as error:
                observed = str(error)  # no workspace, no run in it, or the listed file is missing
            # A file that was listed but cannot be opened was dropped for a newer round: choose again. A missing file is
            # reported only after two equal listings.
            # On NFS a listing may be of an older state than the next one.
            is_stable = not was_dropped and observed == last_observed
            limit_s = timeout_s if is_stable else max(timeout_s, _STABLE_VIEW_S)
            if time.monotonic() - began >= limit_s:
                break
            time.sleep(0.05 if is_stable else 0.001)
            last_observed = observed
        if earlier is not None:
            text = (
                f"the newest file of rank {target_rank} was written before this process began, and this rank's since: "
                "an earlier job may have had the same run=, which must be new for each job. "
                f"round={earlier.round} reads it all the same"
            )
            raise NotFoundError(text, rank=target_rank, path=os.path.join(workspace.path, earlier.relative))
        what = "any round" if round is None else f"round {round}"
        text = (
            f"rank {target_rank} has written no file in {what} within {timeout_s:g} s: wait longer by "
            "timeout_s=, and check that it writes to the same path and run"
        )
        raise NotFoundError(text, rank=target_rank, path=workspace.path)

    def _is_of_earlier_job(self, view: WorkspaceView, name: RankName | None) -> bool:
        """Whether a rank's newest file is older than this process, which has written under a `run` that it was given.

        Both times are by the clock of the file server: the reader's file was there when the process had a known age.
        """
        if name is None or self._written is None or not self._is_run_given:
            return False
        written, age_s = self._written
        here, there = view.stored(written), view.stored(name)
        if here is None or there is None or here.modified is None or there.modified is None:
            return False
        return there.modified < here.modified - age_s - _CLOCK_TICK_S


def _read(view: WorkspaceView, name: RankName) -> tuple[Leaf, dict[str, Leaf]]:
    """Return the config and weights in a rank's file."""
    weights = {}
    file = view.open(name)
    for tensor_name, shard in file.shards.items():
        weights[tensor_name] = from_bytes(file.read(tensor_name), shard.dtype, shard.local_shape)
    leaves = _NoTensors(name.rank, file.path)
    decode = partial(values.decode_parsed, leaves=leaves)
    return decode_stored(file.config, file.path, file.file.budget, decode), weights


class _NoTensors(dict[str, object]):
    """The tensors in the config of a file with configs and weights: there are none."""

    def __init__(self, rank: int, path: str) -> None:
        self._rank = rank
        self._path = path

    def __missing__(self, name: str) -> object:
        text = "this rank saved a state here, not configs and weights: load_checkpoint reads it"
        raise InvalidArgumentError(text, rank=self._rank, path=self._path)


def _position() -> tuple[int, int]:
    """Return (rank, world size) of the communicator or of torch.distributed, else those of the launcher."""
    size = defaults.get_world_size()
    if size > 1:
        return defaults.get_rank(), size
    launch = detect_launch()
    return launch.rank, launch.world_size


def _find(view: WorkspaceView, run: str | None, rank: int, number: int | None) -> tuple[RankName | None, object]:
    """Return a rank's newest file, or that of a round, and everything that was listed for it."""
    if MANIFEST in view.files:
        text = "this is a save, not a workspace of configs and weights: load_checkpoint reads it"
        raise InvalidArgumentError(text, path=view.path)
    if run is None:
        run = _reading_run(view)
    rounds = view.rounds(run) if number is None else [number]
    # All that was looked at: two equal listings show that NFS has no newer one to show.
    listed: list[object] = [run, *rounds]
    for candidate in reversed(rounds):
        try:
            names = view.rank_names(run, candidate)
        except NotFoundError:
            continue  # swept since the rounds were listed
        listed += names
        for name in names:
            if name.rank == rank:
                return name, listed
    return None, listed


def _runs_here() -> list[str]:
    """Return the runs that this process may be in, the likeliest first.

    They are its communicator's, that of torch's default group, and its launcher's job.
    """
    comm = defaults.current()
    candidates: list[str | None] = []
    if comm is not None:
        candidates.append(comm.run)
    if defaults.torch_default_group() is not None:
        from statexchange.comm.backends.torch_groups import run_of_default_group  # late: torch is imported here

        candidates.append(run_of_default_group())
    candidates.append(detect_launch().job)
    return [run for run in candidates if run is not None]


def _reading_run(view: WorkspaceView) -> str:
    """Return the run of this process if it is in the workspace, else the only run there."""
    runs = view.runs()
    for run in _runs_here():
        if run in runs:
            return run
    if len(runs) > 1:
        raise InvalidArgumentError(f"several runs are in this workspace ({', '.join(runs)}): pass run=", path=view.path)
    if not runs:
        raise NotFoundError("no rank has written to this workspace yet", path=view.path)
    return runs[0]
