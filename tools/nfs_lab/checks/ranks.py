"""Four ranks on two hosts."""

from __future__ import annotations

from nfs_lab.agents import Agent, Reply, together
from nfs_lab.checks.registry import check
from nfs_lab.session import CheckFailedError, Session

WORLD_SIZE = 4
LIMIT_S = 40.0
LOCK_WORD = "lock"


@check("G15", ("v42", "v41", "v40", "v3l", "v3"))
def ranks_meet_in_a_directory(session: Session, mount: str) -> str:
    """``init(rendezvous="file://...")``: four ranks join, or all get an error that names the mount's locks.

    After shutdown no file is left in the directory.
    """
    count = 10 if session.long else 1
    return ", ".join(_meet(session, mount) for _ in range(count))


def _meet(session: Session, mount: str) -> str:
    folder = session.path(mount, "rendezvous")
    session.lab.on("cA", f"mkdir -m 777 {folder}")
    replies = _initialize(session, f"{folder}/here")
    _shut_down(session)
    left = session.lab.on("cA", f"find {folder} -type f").split()
    if all(reply.ok for reply in replies):
        session.expect(all(reply.value == [10] for reply in replies), "all_reduce:", *replies)
        session.expect(not left, f"left after shutdown: {left}")
        return "met"
    refused = mount == "v3" and all(reply.named and LOCK_WORD in reply.text for reply in replies)
    session.expect(refused, *replies)
    session.expect(not left, f"left after the refusal: {left}")
    return "refused by name"


def _shut_down(session: Session) -> None:
    together(*((agent, "shutdown", {}) for agent in session.ranks if agent.is_alive))


def _initialize(session: Session, path: str) -> list[Reply]:
    common = {"world_size": WORLD_SIZE, "rendezvous": f"file://{path}", "timeout_s": LIMIT_S}
    calls = ((agent, "initialize", {**common, "rank": rank}) for rank, agent in enumerate(session.ranks))
    return together(*calls, timeout_s=3 * LIMIT_S)


@check("", ("v42", "v3l"))
def ranks_gather_export_and_save(session: Session, mount: str) -> str:
    """Four ranks gather through a workspace, export with overwrite and save, and all hosts read what they wrote."""
    path, count = session.path(mount, "ranks"), 10 if session.long else 1
    for reply in _initialize(session, session.path("v42", "rendezvous-of-ranks")):
        session.value(reply)
    try:
        for step in range(1, count + 1):
            _round_of_ranks(session, path, step)
    finally:
        _shut_down(session)
    return f"{count} times"


@check("", ("v42", "v3l"))
def replicas_read_each_byte_once(session: Session, mount: str) -> str:
    """Four ranks on two hosts load a model that each of them has whole: the server sends each byte once, or twice."""
    path, names = session.path(mount, "replicas"), [f"t{number}" for number in range(8)]
    nbytes = len(names) * (4 << 20)
    for reply in _initialize(session, session.path("v42", "rendezvous-of-replicas")):
        session.value(reply)
    try:
        _on_all(session, "save_replicas", path=path, names=names)
        ratios = []
        for readers in (None, "host"):
            for host in ("cA", "cB"):
                session.lab.on(host, "sync; echo 3 > /proc/sys/vm/drop_caches")
            before = _bytes_of_server(session, mount)
            for reply in _on_all(session, "load_replica", path=path, names=names, readers=readers):
                session.expect(reply.value == list(range(len(names))), "loaded:", reply)
            ratios.append((_bytes_of_server(session, mount) - before) / nbytes)
    finally:
        _shut_down(session)
    session.expect(1 <= ratios[0] <= 1.05, f"bytes of the server, of those of the model: {ratios[0]:.3f}")
    return f"{ratios[0]:.2f}x of the model's bytes, with readers='host' {ratios[1]:.2f}x"


def _bytes_of_server(session: Session, mount: str) -> int:
    """Return how many bytes both clients have read from the server through a mount."""
    field = f"awk '/mounted on .run.m.{mount} /{{here=1}} here && /bytes:/{{print $6; exit}}' /proc/self/mountstats"
    return sum(int(session.lab.on(host, field)) for host in ("cA", "cB"))


def _round_of_ranks(session: Session, path: str, step: int) -> None:
    ranks = list(range(WORLD_SIZE))
    gathered = _on_all(session, "gather", step=step, workspace=f"{path}/gather", ranks=ranks)
    expected = [10.0 * step + rank for rank in ranks] + [[rank, step] for rank in ranks]
    session.expect(gathered[0].value == expected, "gathered:", gathered[0])
    _on_all(session, "publish_sharded", path=f"{path}-model", step=step)
    for agent in (session.a, session.b):
        reply = _one(agent, "check_sharded", path=f"{path}-model", step=step, world_size=WORLD_SIZE)
        session.expect(reply.value == [], f"exported, read on {agent.host}:", reply)
    _on_all(session, "save_of_rank", path=f"{path}-save", step=step)
    for reply in _on_all(session, "load_of_rank", path=f"{path}-save"):
        session.expect(reply.value == [step], "loaded:", reply)


def _on_all(session: Session, action: str, **arguments: object) -> list[Reply]:
    replies = together(*((agent, action, arguments) for agent in session.ranks))
    for reply in replies:
        if not reply.ok:
            raise CheckFailedError(f"{action}: {' | '.join(map(str, replies))}")
    return replies


def _one(agent: Agent, action: str, **arguments: object) -> Reply:
    return agent.call(action, timeout_s=60.0, **arguments)
