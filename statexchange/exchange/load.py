"""The story of a load: what the source has is matched with the live state, read, and installed."""

from __future__ import annotations

import contextlib
import logging
import time

from statexchange.comm.communicator import Communicator
from statexchange.errors import ReplacedError
from statexchange.exchange.load_items import items_to_read, mark_targets
from statexchange.exchange.load_report import LoadReport, LoadRequest, notes_on_lost_ties, notes_on_overflows
from statexchange.exchange.load_source import located, open_for_state, source_content
from statexchange.exchange.name_check import compare_names, settle_names
from statexchange.exchange.placing import renumbered_names
from statexchange.exchange.reading import assign_readers, read_all
from statexchange.exchange.same_source import check_same_source
from statexchange.exchange.whose_state import check_whose_state
from statexchange.state.flatten import flatten
from statexchange.state.match import match
from statexchange.tensors import (
    collector_paused,
)

__all__ = ["load_now"]

_log = logging.getLogger(__name__)


def load_now(request: LoadRequest, comm: Communicator) -> LoadReport:
    """Load as `load_checkpoint` does. Collective."""
    try:
        report = _load(request, comm)
    except ReplacedError:  # raised on all ranks: the new version is loaded instead, once
        report = _load(request, comm, reads_again=True)
    if comm.rank == 0:
        _log.info("loaded %s", report)
        for note in report.notes:
            _log.warning("loaded from %s: %s", report.path, note)
    return report


def _load(request: LoadRequest, comm: Communicator, *, reads_again: bool = False) -> LoadReport:
    """Load once. Collective.

    Each phase ends in an agreement of all ranks: what one raises in it, all raise, so that none waits for another that
    has failed. That is why collectives lie between the phases, and a step with a collective in its middle has two.
    """
    state, timeout_s = request.state, request.stall_timeout_s
    with contextlib.ExitStack() as holding:
        with collector_paused():
            with comm.phase("reading the headers", timeout_s=timeout_s):
                source = holding.enter_context(open_for_state(request, comm))
            has_layout = request.options.layout is not None
            # Before ranks convert it: they compare the files, and each may convert them in its own way.
            if comm.world_size > 1:
                has_layout = check_same_source(source, request, comm)
            with comm.phase("finding its tensors", timeout_s=timeout_s), located(source.path):
                live = flatten(state)
                loaded = source_content(request, source, live, comm)
            if has_layout:
                loaded.matching.renumbered = renumbered_names(comm, live, loaded.matching)
            with comm.phase("finding its tensors", timeout_s=timeout_s), located(source.path):
                plan = match(state, live, loaded.matching)
                if loaded.tensors.own_rank is None:  # as many ranks as have saved get back what each had
                    check_whose_state(plan, loaded, live)
                if plan.missing or loaded.converted.source.unreadable:
                    settle_names(plan, loaded)
            items = items_to_read(plan, loaded, comm, has_layout=has_layout, timeout_s=timeout_s)
            # Last of the checks: a shape that differs says more than the names that differ because of it.
            compare_names(comm, request, plan, loaded)
        if request.before_reading is not None:
            request.before_reading(items)
        # An object store is asked once per host; files are in the page cache after their first reader.
        readers = assign_readers(items, comm) if source.opened.store.is_remote else {}
        with comm.phase("reading", timeout_s=timeout_s):
            mark_targets(plan, items)
            nbytes, overflows = read_all(items, readers, comm, request.on_progress, reads_again=reads_again)
            for install in plan.callbacks:
                install()
        notes: tuple[str, ...] = ()
        if loaded.tensors.aliases:
            notes += notes_on_lost_ties(plan, loaded.tensors.aliases)
        if request.options.dtype is not None:  # equal on all ranks
            notes += notes_on_overflows(comm, overflows)
    seconds = time.perf_counter() - request.began
    missing, unexpected = tuple(plan.missing), tuple(plan.unexpected)
    return LoadReport(source.path, len(plan.targets), nbytes, missing, unexpected, seconds, source.step, notes)
