"""A model of how a collective ends: in every interleaving of three ranks all succeed or all fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from sweeps import slow

from statexchange.comm.failure.outcome import ABSENT, CLOSING, FAILED, HERE, PASSED, SEEN, UNKNOWN, next_phase

RANKS = 3
State = tuple[object, ...]
ENDED = (FAILED, PASSED, UNKNOWN)


def reachable(
    start: State, moves: Callable[[State], Iterator[State]], alike: Callable[[State], State] = lambda state: state
) -> tuple[set[State], list[State]]:
    """Return all states that can be reached, and those without a next state."""
    seen, todo, last = {start}, [start], []
    while todo:
        state = todo.pop()
        following = [alike(after) for after in moves(state)]
        if not following:
            last.append(state)
        for after in following:
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return seen, last


# On one host: in shared memory each rank writes a word, and reads the words of the others one after another


class Rank(NamedTuple):
    shown: int  # its word, which the others read
    own: int  # its own state; ABSENT until it arrives
    reads: tuple[int, ...]  # the words that it has read in this pass
    gives_up: bool
    alive: bool


def show(own: int) -> int:
    return {SEEN: HERE, UNKNOWN: CLOSING}.get(own, own)


def steps(ranks: tuple[Rank, ...], me: int, *, closes: bool, first: int) -> Iterator[Rank]:
    rank = ranks[me]
    if not rank.alive or rank.own in ENDED:
        return
    if rank.own == ABSENT:
        yield rank._replace(own=first, shown=HERE)
        return
    if closes and not rank.gives_up and not rank.reads and rank.own != CLOSING:
        yield rank._replace(gives_up=True)  # its deadline has run out
    others = [other for number, other in enumerate(ranks) if number != me]
    if len(rank.reads) < len(others):
        other = others[len(rank.reads)]
        seen = other.shown
        if not other.alive and seen == HERE and rank.own == CLOSING:
            seen = CLOSING
        yield rank._replace(reads=(*rank.reads, seen))
        return
    after = next_phase(rank.own, min(rank.reads), max(rank.reads), rank.gives_up and rank.own != CLOSING)
    yield rank._replace(own=after, shown=show(after), reads=())


def moves_on_a_host(dying: bool, first: int) -> Callable[[State], Iterator[State]]:
    def moves(state: State) -> Iterator[State]:
        ranks: tuple[Rank, ...] = state  # type: ignore[assignment]
        for me in range(len(ranks)):
            for after in steps(ranks, me, closes=True, first=first):
                yield (*ranks[:me], after, *ranks[me + 1 :])
            if dying and ranks[me].alive and all(rank.alive for rank in ranks):
                yield (*ranks[:me], ranks[me]._replace(alive=False), *ranks[me + 1 :])

    return moves


@pytest.mark.parametrize("size", [2, slow(RANKS)])
@pytest.mark.parametrize("dying", [False, True])
def test_on_one_host_all_fail_or_all_succeed(size: int, dying: bool) -> None:
    first = SEEN if size == 2 else HERE
    start = (Rank(ABSENT, ABSENT, (), gives_up=False, alive=True),) * size
    seen, last = reachable(start, moves_on_a_host(dying, first))
    for state in seen:
        ends = {rank.own for rank in state if rank.alive}  # type: ignore[attr-defined]
        assert not {PASSED, FAILED} <= ends, state
    outcomes = {frozenset(r.own for r in state if r.alive) for state in last}  # type: ignore[attr-defined]
    # A rank may only wait for ever for a rank that died before it arrived; a real rank then reaches its deadline.
    assert outcomes - {frozenset()} == {frozenset({PASSED}), frozenset({FAILED})}, outcomes


def test_with_a_single_pass_ranks_of_one_host_may_differ_in_their_outcome() -> None:
    """This proves that the test above can find such a state."""
    start = (Rank(ABSENT, ABSENT, (), gives_up=False, alive=True),) * RANKS
    seen, _ = reachable(start, moves_on_a_host(dying=False, first=SEEN))
    assert any({PASSED, FAILED} <= {rank.own for rank in state} for state in seen)  # type: ignore[attr-defined]


# Through a coordinator: it asks each rank; answers and its decision arrive at any time, or never


class Member(NamedTuple):
    own: int
    passed: bool  # it has written that it has passed
    asked: bool  # it has received that the collective is closed, and has answered
    answer: int | None  # its answer: in transit, then at the coordinator
    gives_up: bool
    reachable: bool


class Collective(NamedTuple):
    members: tuple[Member, ...]
    closed: bool
    votes: tuple[int, ...]
    decision: int
    late: bool  # the coordinator has stopped waiting


def own_moves(collective: Collective, me: int) -> Iterator[Member]:
    member = collective.members[me]
    if member.own in ENDED:
        return
    if member.own == ABSENT:
        yield member._replace(own=HERE)
        return
    arrived = all(other.own != ABSENT for other in collective.members)
    if member.own == HERE:
        if not member.gives_up:
            yield member._replace(gives_up=True)
        if arrived and not member.passed:
            yield member._replace(passed=True)  # it writes first, and then reads whether the collective is closed
        if member.passed:
            after = next_phase(SEEN, HERE, CLOSING if member.asked else HERE, False)
            yield member._replace(own=after)
        elif member.gives_up:
            yield member._replace(own=next_phase(HERE, ABSENT, HERE, True))
        return
    seen = collective.decision if member.reachable and member.asked else HERE
    if seen == UNKNOWN or not member.reachable:
        yield member._replace(own=next_phase(CLOSING, HERE, HERE, True))
    elif seen != HERE:
        yield member._replace(own=next_phase(CLOSING, HERE, seen, False))


def moves_of_a_collective(state: State) -> Iterator[State]:
    collective: Collective = state  # type: ignore[assignment]

    def with_member(me: int, member: Member) -> Collective:
        return collective._replace(members=(*collective.members[:me], member, *collective.members[me + 1 :]))

    for me, member in enumerate(collective.members):
        for after in own_moves(collective, me):
            yield with_member(me, after)
        if member.own == CLOSING and member.reachable and not collective.closed:
            yield collective._replace(closed=True)
        if collective.closed and member.reachable and not member.asked:
            yield with_member(me, member._replace(asked=True))
        if member.asked and member.answer is None:  # after it has received that: the other order would be a race
            yield with_member(me, member._replace(answer=PASSED if member.passed else CLOSING))
        if member.answer is not None and member.reachable and collective.votes[me] == HERE:
            votes = list(collective.votes)
            votes[me] = member.answer
            yield collective._replace(votes=tuple(votes))
        if me == 1 and member.reachable:  # one of the two, as they are symmetric
            yield with_member(me, member._replace(reachable=False))
    if collective.closed and collective.decision == CLOSING:
        if not collective.late and not all(member.reachable for member in collective.members):
            yield collective._replace(late=True)
        after = next_phase(CLOSING, min(collective.votes), max(collective.votes), collective.late)
        if after != CLOSING:
            yield collective._replace(decision=after)


def alike(state: State) -> State:
    """Return one of two states that differ only in which of the ranks 0 and 2 is which."""
    collective: Collective = state  # type: ignore[assignment]
    other = collective._replace(members=collective.members[::-1], votes=collective.votes[::-1])
    return min(collective, other, key=hash)


@pytest.mark.slow
def test_through_a_coordinator_no_rank_fails_if_another_has_passed() -> None:
    member = Member(ABSENT, passed=False, asked=False, answer=None, gives_up=False, reachable=True)
    start = Collective((member,) * RANKS, closed=False, votes=(HERE,) * RANKS, decision=CLOSING, late=False)
    seen, last = reachable(start, moves_of_a_collective, alike)
    assert len(seen) > 1000
    for state in seen:
        collective: Collective = state  # type: ignore[assignment]
        ends = {member.own for member in collective.members}
        assert not {PASSED, FAILED} <= ends, collective
    for state in last:
        collective = state  # type: ignore[assignment]
        ends = {member.own for member in collective.members}
        assert ends <= set(ENDED), collective
        if all(member.reachable for member in collective.members):
            assert ends in ({PASSED}, {FAILED}), collective
