"""A rank on one host dies or fails during an export, save or load: the ranks of both hosts raise its error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from faults import LAYOUT, LEFT, Trapped, state_of, strike
from stored import contents_of
from sweeps import slow
from two_hosts import init_on_two_hosts, two_hosts

import statexchange as sx
from statexchange.report.verify import verify

RANKS = 4


def act(verb: str, out: str, value: float, how: str | None, rank: int) -> None:
    """Run the operation on a state filled with `value`; with `how` a fault happens to `rank`."""
    comm = sx.get_communicator()
    state = state_of(comm.rank, value, RANKS)

    def fault(done: int = 0, total: int = 0) -> None:
        if how is not None and comm.rank == rank and done == total:
            strike(how)

    if verb == "export":
        sx.export_checkpoint(state, out, layout=LAYOUT, overwrite=True, on_progress=fault)
    elif verb == "save":
        sx.save_checkpoint(Trapped(state, fault), out, layout=LAYOUT, overwrite=True)
    else:
        live = {name: torch.zeros_like(t) if name != "rows" else torch.zeros(30, 100) for name, t in state.items()}
        sx.load_checkpoint(Trapped(live, fault), out, strict=False)


def fails(verb: str, out: str, how: str, rank: int) -> str:
    """Run the operation while a fault happens to `rank`; return the error that this rank raises.

    Root checks that the target and what lies beside it are as they were, but for what a killed rank may leave.
    """
    comm = init_on_two_hosts(15.0)
    act("save" if verb == "save" else "export", out, 1.0, None, rank)
    sees = os.path.isdir(out)
    before = contents_of(Path(out)) if sees else {}
    comm.barrier()
    with pytest.raises(sx.errors.PeerError) as caught:
        act(verb, out, 2.0, how, rank)
    if comm.rank == 0:
        found = contents_of(Path(out))
        assert {name: data for name, data in found.items() if name in before} == before
        left = [name for name in os.listdir(os.path.dirname(out)) if name != os.path.basename(out)]
        assert all(name.endswith(LEFT) for name in left)
        assert not left or how == "kill"
    sx.shutdown()
    return str(caught.value)


def next_run(verb: str, out: str) -> None:
    """Run the operation without a fault, and check its result."""
    comm = init_on_two_hosts(15.0)
    act(verb, out, 3.0, None, 0)
    if comm.rank == 0 and verb != "load":
        with sx.open_checkpoint(out) as checkpoint:
            assert (checkpoint["rows"].read() == 3).all()
        assert verify(out).findings == ()
        assert os.listdir(os.path.dirname(out)) == [os.path.basename(out)]
    sx.shutdown()


@pytest.mark.parametrize(
    ("verb", "rank", "shared", "how"),
    [
        ("export", 3, False, "kill"),
        slow("export", 0, False, "raise"),
        slow("export", 2, True, "kill"),
        slow("save", 3, True, "kill"),
        slow("load", 2, True, "raise"),
    ],
)
def test_a_rank_that_fails_on_one_host_is_named_on_both_and_the_next_run_succeeds(
    verb: str, rank: int, shared: bool, how: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "in" / "out") if shared else "/dev/shm/below/out"
    with two_hosts(2, 2) as hosts:
        hosts.start(fails, verb, out, how, rank)
        outcomes = hosts.finish(40)
        survivors = [o for o in outcomes if how == "raise" or o.rank != rank]
        assert all(o.state == "ok" for o in survivors), hosts.describe(outcomes)
        hosts.run(next_run, verb, out)
    host = "anna" if rank < 2 else "bert"
    assert all(o.value.startswith(f"rank {rank} on {host} failed in ") for o in survivors)
