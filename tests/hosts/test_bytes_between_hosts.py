"""The bytes that each algorithm sends between two hosts of two ranks, by the counters of their network cards."""

import pytest
import torch
from two_hosts import CABLE, init_on_two_hosts, two_hosts

import statexchange as sx
from statexchange.train.algorithms import (
    Algorithm,
    Decentralized,
    GradientAllReduce,
    QuantizedAllReduce,
    ScatterGatherAllReduce,
)

NUMEL = 1 << 20
BUCKET = 4 * NUMEL
HOSTS = 2

# The bytes that the docstrings state, for HOSTS hosts and a bucket of float32; without hierarchy for comparison
FORMULAS: list[tuple[Algorithm, int]] = [
    (GradientAllReduce(hierarchical=True), 2 * (HOSTS - 1) * BUCKET),
    (ScatterGatherAllReduce(hierarchical=True), 3 * (HOSTS - 1) * BUCKET),
    (QuantizedAllReduce(hierarchical=True), 2 * HOSTS * (HOSTS - 1) * (8 + NUMEL // HOSTS)),
    (Decentralized("all", hierarchical=True), 2 * (HOSTS - 1) * BUCKET),
    (Decentralized("shift_one", hierarchical=True), HOSTS * BUCKET),
    (Decentralized("ring", hierarchical=True), 2 * BUCKET),
    (Decentralized("shift_one", hierarchical=False), 2 * HOSTS * BUCKET),
]


SEGMENT_BYTES = 1448  # of data in a full TCP segment; one header is counted for many that are sent together


def sent_bytes() -> int:
    """Return the number of bytes that this host has sent over the cable so far, without what TCP sent again.

    TCP sends again what a busy machine confirms late.
    """
    with open("/proc/self/net/dev") as file:
        line = next(line for line in file if line.strip().startswith(f"{CABLE}:"))
    with open("/proc/self/net/snmp") as file:
        names, numbers = (line.split() for line in file if line.startswith("Tcp:"))
    sent_again = int(dict(zip(names, numbers, strict=True))["RetransSegs"])
    return int(line.partition(":")[2].split()[8]) - sent_again * SEGMENT_BYTES


def bytes_of_a_step() -> list[int]:
    """Return by algorithm the number of bytes that this host sends in one step."""
    comm = init_on_two_hosts()
    found = []
    for algorithm, _ in FORMULAS:
        parameter = torch.nn.Parameter(torch.full((NUMEL,), 1.0 + comm.rank))
        module = torch.nn.ParameterList([parameter])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        _, optimizer = sx.train.data_parallel(module, optimizer, algorithm, comm, bucket_bytes=BUCKET)
        for _ in range(2):  # the first step makes the buckets
            comm.barrier()
            before = sent_bytes()
            (parameter * torch.linspace(0, 1 + comm.rank, NUMEL)).sum().backward()
            optimizer.step()
            comm.barrier()
            sent = sent_bytes() - before
            optimizer.zero_grad()
        found.append(sent)
    sx.shutdown()
    return found


@pytest.mark.slow
def test_each_algorithm_sends_the_bytes_that_its_docstring_states() -> None:
    with two_hosts(2, 2) as hosts:
        by_rank = hosts.run(bytes_of_a_step, timeout_s=120)
    for at, (algorithm, expected) in enumerate(FORMULAS):
        sent = by_rank[0][at] + by_rank[2][at]  # the first rank of each host
        assert expected <= sent < 1.05 * expected + 20_000, (algorithm, sent, expected)
