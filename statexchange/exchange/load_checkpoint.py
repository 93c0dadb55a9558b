"""The public call that loads a checkpoint into live state, in place, from any mesh and placements into any other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from statexchange.comm.calls import public_call
from statexchange.comm.communicator import CommLike
from statexchange.comm.defaults import as_communicator
from statexchange.exchange.chosen_conversion import ChosenConversion
from statexchange.exchange.load import load_now
from statexchange.exchange.load_report import LoadReport, LoadRequest
from statexchange.sharding.options import CallOptions, Convert, LoadOptions, Rename, Replicas
from statexchange.state.describe import State

__all__ = ["load_checkpoint"]


@public_call("load_checkpoint")
def load_checkpoint(
    state: State,
    path: str | os.PathLike[str],
    *,
    comm: CommLike | None = None,
    strict: bool = True,
    layout: Mapping[str, object] | None = None,
    include: str | Sequence[str] = (),
    exclude: str | Sequence[str] = (),
    rename: Rename = (),
    convert: Convert | None = None,
    convert_with: Mapping[str, int] | None = None,
    dtype: Literal["state"] | None = None,
    replicas: Replicas = "equal",
    on_progress: Callable[[int, int], None] | None = None,
    stall_timeout_s: float = 300.0,
) -> LoadReport:
    """Load the checkpoint at `path` into `state`, in place and bit for bit as it was saved.

    Collective over `comm`; blocks until all ranks are done. A rank reads what its own boxes need, so world size, mesh
    and placements may differ from those of the save. What several ranks of a host need is read once: from files through
    the page cache, from an object store by one rank, which sends it to the others. Shapes, dtypes and names are checked
    before anything is changed; a failure on any rank is raised on all. Tensors are filled as they are read, those that
    an optimizer has already among them. After a failure during reading, each is as it was, or as it was saved; one that
    was read in part, or whose bytes differ from their digest, is filled with NaN (all bits set) unless its old values
    are still there. An error of the source's bytes or of reading them says how many tensors have changed. Param groups,
    new state of optimizers, plain values and other objects change on no rank before all have read everything; if one of
    them then refuses its state, what comes before it in the state has changed.

    Values that differ between ranks (e.g. RNG state) are restored per rank if the world size is unchanged. Otherwise
    they raise ReplicaError, unless `exclude` leaves them as they are or `replicas` is "root". So does the state of an
    object with ``per_rank = True``, even if it is equal on all ranks.
    Modules and optimizers whose `load_state_dict` does more than torch's, by hooks or overrides, load what was read.
    Tensors with no counterpart in state are created as torch tensors; where torch is not installed, as numpy arrays.

    Boxes that a rank reads whole are checked against their digests; `verify` checks all. All ranks read the same
    checkpoint: if it is replaced during the load, the new one is loaded instead; a second replacement is an error.

    `strict`, `dtype`, `replicas` and a layout's mesh must be the same on all ranks. `layout`, `include`, `exclude` and
    `rename` may otherwise differ, as between the stages of a pipeline.

    Args:
        state: a module, a mapping of names to tensors or a list of modules, with the source's names for tensors; or a
            nested mapping as for `save_checkpoint`, ``{"model": ..., "optimizer": ..., "step": 7}``, in which
            optimizers get state and param groups, objects with `load_state_dict` get their own state, and other entries
            are replaced. State of an optimizer goes to the parameter of the same name, in whatever group; that of a
            source with numbers alone, as an optimizer's own `state_dict()`, goes by order, as in torch.
            Megatron-Core's ShardedTensors are matched by their keys.
        path: a path or URL of anything that `merge_checkpoint` reads.
        comm: the communicator; by default the current one.
        strict: raise an error for names of the state that the source lacks and for names of the source that no rank
            has, as torch does; else the report lists them, and it is an error only if the source has no tensor of the
            state, or no entry of a state of plain values. Shapes and dtypes must be equal in any case. Plain values of
            a torch checkpoint that no rank has are listed by the report alone, and so is extra state of modules if a
            safetensors checkpoint has none, as an export. State of an optimizer of another shape
            or dtype than the saved one is replaced.
        layout: rules for plain tensors of `state` that are parts of whole ones, as in `export_checkpoint`, by their
            dotted paths: ``{"*.up.weight": Shard(0)}``. Optimizer state of a parameter's shape follows the parameter's
            rule. A rule that renames (split, renumber) is for sources of tensors alone, such as a Hugging
            Face checkpoint, and not for what `save_checkpoint` has written.
        include: shell patterns, one or several, of the names in `state` to load, by their dotted paths:
            ``"model.encoder.*"``, or ``"model"`` for all in it; the items of a list have their indices as names,
            ``"optimizers.0"``, and a dataclass its fields. All else stays as it is, is not read, and counts as neither
            missing nor unexpected.
            Of an optimizer the state of each parameter, ``"optimizer.state.NAME"``, and its hyperparameters,
            ``"optimizer.param_groups.NAME"``, are selected by themselves. Another object with a state of its own, or a
            list of plain values, is loaded whole if anything in it matches, as it was saved or as it is now. It is an
            error if nothing at all is selected on any rank; one of several patterns may match nothing.
        exclude: shell patterns, in the form of `include`, of the names in `state` to leave as they are: ``"random.*"``.
            Another object than an optimizer, or a list of plain values, is left whole if anything in it matches, as it
            was saved or as it is now; of an optimizer the state of one parameter, or its hyperparameters.
        rename: from the source's names to those in `state`: a function, or (regex, replacement) pairs, which are
            applied in order. Names are dotted paths; the parameters of optimizers are renamed too. What moves with its
            mapping keeps its keys. What is inside a list, or in the state of another object, is not renamed. Where a
            model of transformers has other names in memory than in its files, this gives the names of the files.
        convert: convert the source's model to the names and values of the state first: a built-in conversion such as
            "torchtitan:llama3", the path of a JSON file (`statexchange.conversions.rules`), or the file's content.
            "inverse:" before the name or path converts in the other direction. Only the model's tensors are loaded
            then. A name of the source without a rule is unexpected. `rename` applies to the names after the conversion.
        convert_with: numbers that the conversion needs, as ``{"n_heads": 32}``. Others come from the config of a state
            that is a model of transformers, or from a config.json beside the source.
        dtype: None: dtypes must be equal, and values are loaded bit for bit. "state": where floating dtypes (float16,
            bfloat16, float32, float64) differ, values are cast to that of the tensor in `state`, rounded to nearest;
            the report's `notes` name tensors in which finite values became infinite.
            Optimizer state that does not exist yet gets the parameter's dtype if it has its shape, else the source's.
        replicas: what to do if the number of ranks has changed and ranks saved different values of one region or plain
            value, such as BatchNorm's statistics under DistributedDataParallel: "equal" raises ReplicaError, "root"
            takes the lowest rank's. On the same number of ranks, each gets its own.
        on_progress: called with the bytes that this rank has read and those that it will read.
        stall_timeout_s: limit of the time in which no rank moves a byte; the total time is not limited. A rank that
            does not call at all is waited for until the communicator's `timeout_s`.

    Returns:
        The number of bytes and tensors that this rank has read, and the names that were missing or unexpected.

    Raises:
        NotFoundError: there is no known checkpoint at `path`, or with `strict` a name is missing from it.
        InvalidArgumentError: with `strict` a name is unexpected; a shape or dtype differs; an optimizer is of another
            class than the saved one; ranks passed different paths or options; a layout rule does not fit a tensor, or
            matches none; `include` and `exclude` leave nothing to load.
        IncompleteError: a rank's file or a region of a tensor is missing.
        OverlapError: two ranks saved overlapping regions of a tensor.
        ReplicaError: ranks saved different values of a region or plain value, or two live tensors share memory and the
            source has different values for them; then the state has been changed. Or what belongs to a rank was saved
            by another number of ranks.
        CorruptError: bytes differ from their digest, or files contradict each other.
        ReplacedError: the checkpoint was replaced during the load, twice.
        UnsafeError: `rename` gives two entries one name, or moves one into another.
        UnsupportedError, StorageError: see `statexchange.errors`.
        StallError: no rank has moved a byte for `stall_timeout_s`.
        PeerError: another rank has failed.

    Example:
        >>> import torch
        >>> import statexchange as sx
        >>> report = sx.save_checkpoint({"model": {"w": torch.ones(2)}, "step": 7}, "saved")
        >>> state = {"model": {"w": torch.zeros(2)}, "step": 0}
        >>> report = sx.load_checkpoint(state, "saved")
        >>> state
        {'model': {'w': tensor([1., 1.])}, 'step': 7}
    """
    arguments = locals()
    communicator = as_communicator(comm)
    began = time.perf_counter()
    # Once, before a load that may run twice: `include` may be an iterator, which a second run would find used up.
    with communicator.phase("checking its options"):
        options = LoadOptions.of(arguments)
        conversion = ChosenConversion.of(options, state) if options.converts else None
        request = LoadRequest(state, path, options, CallOptions.of(arguments), began, conversion)
    return load_now(request, communicator)
