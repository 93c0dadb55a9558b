"""Rounds of workspaces, and readers that look early or while rounds are dropped."""

from __future__ import annotations

import time
from typing import Any

from nfs_lab.agents import Agent, Reply, together
from nfs_lab.checks.registry import check
from nfs_lab.session import CheckFailedError, Session

EARLY_MOUNTS = ("v42", "v3", "v42ac600")
WAIT_S = 6.0  # much less than the 30 s for which a client caches an absent name


@check("H2", ("v42", "v40", "v3l", "v3"))
def newest_round_is_read(session: Session, mount: str) -> str:
    """After a writer's answer, a reader on the other host reads that round, with a new or an old workspace object."""
    path, count = session.path(mount, "rounds"), session.times(10)
    wrong = _exchange(session, path, count)
    session.expect_none(wrong, of=count)
    return f"{count} rounds"


@check("H2", ("v3l", "v3"))
def newest_round_is_read_beside_a_polling_reader(session: Session, mount: str) -> str:
    """The same while another process of the reader's host polls the workspace, which keeps its caches full.

    On NFS v3 two changes of a directory within one tick of the server's clock look like one to a client.
    """
    path, count = session.path(mount, "polled"), 600 if session.long else 25
    session.value(session.a.call("write_round", path=path, run="run", step=0))
    stop = session.stop_file()
    limits = {"seconds": 600.0, "reads_max": 10**9, "stop": stop}
    session.b2.start("read_rounds_repeatedly", path=path, run="run", **limits)
    try:
        wrong = _exchange(session, path, count)
    finally:
        session.lab.on(session.b2.host, f"touch {stop}")
        polled = session.value(session.b2.result())
    session.expect_none(wrong, of=count)
    return f"{count} rounds beside {polled['reads']} reads"


def _exchange(session: Session, path: str, count: int) -> list[str]:
    wrong = []
    for step in range(1, count + 1):
        session.value(session.a.call("write_round", path=path, run="run", step=step))
        reply = session.b.call("read_round", path=path, run="run", fresh=step % 2 == 0)
        if reply.value != [step]:
            wrong.append(f"round {step}: {reply}")
    return wrong


@check("H1", EARLY_MOUNTS)
def early_reader_finds_a_workspace(session: Session, mount: str) -> None:
    """A reader that looked for a workspace before it existed finds it once it is written."""
    path = session.path(mount, "early/workspace")
    first = session.b.call("read_round", path=path, run="run")
    session.expect(first.error == "NotFoundError", "before the first write:", first)
    session.value(session.a.call("write_round", path=path, run="run", step=1))
    reply = session.b.call("read_round", path=path, run="run", timeout_s=WAIT_S)
    session.expect(reply.value == [1], reply)


@check("H1", EARLY_MOUNTS)
def waiting_reader_finds_a_workspace(session: Session, mount: str) -> None:
    """A reader that waits (`timeout_s`) for a workspace that does not exist yet finds it once it is written."""
    path = session.path(mount, "waited/workspace")
    session.b.start("read_round", path=path, run="run", timeout_s=WAIT_S)
    time.sleep(0.5)
    session.value(session.a.call("write_round", path=path, run="run", step=1))
    reply = session.b.result()
    session.expect(reply.value == [1], reply)


@check("H1", EARLY_MOUNTS)
def early_reader_finds_a_checkpoint(session: Session, mount: str) -> None:
    """A reader that looked for a checkpoint before it existed finds it right after its publication."""
    path = session.path(mount, "model")
    first = session.b.call("read", path=path)
    session.expect(first.error == "NotFoundError", "before the publication:", first)
    session.value(session.a.call("publish", path=path, step=1))
    reply = session.b.call("read", path=path)
    session.expect(reply.value == [1], reply)


@check("H3", ("v42", "v3l"))
def reads_go_on_while_rounds_are_dropped(session: Session, mount: str) -> str:
    """A reader always gets a round while a writer drops old ones, with `timeout_s` 0 and 20.

    150 reads of each kind over both mounts; 600 in the long form.
    """
    count, seconds, stop = 300 if session.long else 75, 120.0 if session.long else 30.0, session.stop_file()
    paths = [session.path(mount, name) for name in ("dropped0", "dropped20")]
    for writer, path in zip((session.a, session.a2), paths, strict=True):
        session.value(writer.call("write_round", path=path, run="run", step=1))
        writer.start("write_rounds_repeatedly", path=path, run="run", seconds=seconds + 5, stop=stop)
    for reader, path, timeout_s in zip((session.b, session.b2), paths, (0.0, 20.0), strict=True):
        limits = {"seconds": seconds, "reads_max": count, "timeout_s": timeout_s}
        reader.start("read_rounds_repeatedly", path=path, run="run", **limits)
    read = [reader.result(seconds + 90) for reader in (session.b, session.b2)]
    session.lab.on(session.a.host, f"touch {stop}")
    rounds = sum(session.value(writer.result()) for writer in (session.a, session.a2))
    results = [session.value(reply) for reply in read]
    for timeout_s, result in zip((0, 20), results, strict=True):
        session.expect(not result["errors"] and not result["mixed"], f"timeout_s={timeout_s}: {_short(result)}")
    return f"{' and '.join(str(result['reads']) for result in results)} reads, {rounds} rounds"


@check("A6", ("v42", "v3l"))
def loads_go_on_while_a_save_is_replaced(session: Session, mount: str) -> str:
    """`load_checkpoint` always gets one whole save while another host replaces it again and again."""
    path, seconds = session.path(mount, "replaced/save"), 60.0 if session.long else 3.0
    session.value(session.a.call("save", path=path, step=1))
    saved, loaded = together(
        (session.a, "save_repeatedly", {"path": path, "seconds": seconds}),
        (session.b, "load_saves_repeatedly", {"path": path, "seconds": seconds - 0.3}),
        timeout_s=seconds + 90,
    )
    result = session.value(loaded)
    session.expect(not session.value(saved)["errors"], "saving:", saved)
    session.expect(not result["errors"] and not result["mixed"], _short(result))
    return f"{result['reads']} loads, {saved.value['done']} saves"


@check("", ("v42", "v3l", "v3"))
def saves_link_files_of_another_host(session: Session, mount: str) -> str:
    """Jobs on two hosts in turn save to one directory: each links the base that the other wrote, and both load it."""
    path, count = session.path(mount, "adapters"), session.times(4)
    for step in range(1, count + 1):
        writer, reader = (session.a, session.b) if step % 2 else (session.b, session.a)
        linked = session.value(writer.call("save_adapter", path=path, step=step))
        session.expect((linked > 0) == (step > 1), f"step {step}: {linked} bytes were linked")
        reply = reader.call("load_adapter", path=path)
        session.expect(reply.value == step, f"step {step}:", reply)
    return f"{count} saves"


def _short(result: dict[str, Any]) -> str:
    return f"of {result['reads']} reads: mixed {result['mixed']}, errors {result['errors']}"


@check("C2", ("v42", "v3l", "v3"))
def files_of_two_hosts_are_kept(session: Session, mount: str) -> str:
    """Two hosts write rounds of one run at the same time: whatever was acknowledged can be read on the other host."""
    path, count, lost = session.path(mount, "two-writers"), session.times(4), []
    for step in range(1, count + 1):
        replies = _at_once(session.a, session.b, "write_round_at", step, path=path, run="run", step=step)
        for rank, (reply, reader) in enumerate(zip(replies, (session.b2, session.a2), strict=True)):
            session.value(reply)
            found = reader.call("read_round", path=path, run="run", rank=rank)
            if found.value != [step]:
                lost.append(f"round {step} of rank {rank}: {found}")
    session.expect_none(lost, of=2 * count)
    return f"{2 * count} files"


@check("C2", ("v42", "v3l", "v3"))
def saves_of_two_hosts_are_whole(session: Session, mount: str) -> str:
    """Two hosts save to one path at the same time: an acknowledged save is what a load finds, and `verify` agrees."""
    count, wrong = session.times(4), []
    for race in range(count):
        path = session.path(mount, "two-saves")
        at = time.time() + 0.05
        replies = together(
            (session.a, "save_at", {"path": path, "step": 1, "at": at, "jitter_s": 0.02 * (race % 2)}),
            (session.b, "save_at", {"path": path, "step": 2, "at": at, "jitter_s": 0.02 * (race % 2)}),
        )
        acknowledged = [[step] for step, reply in zip((1.0, 2.0), replies, strict=True) if reply.ok]
        found, findings = session.b2.call("load_save", path=path), session.b2.call("verify", path=path)
        refused = all(reply.ok or reply.named for reply in replies)
        if found.value not in acknowledged or findings.value != [] or not refused:
            wrong.append(f"{' | '.join(map(str, replies))}; loaded {found}; verify {findings}")
    session.expect_none(wrong, of=count)
    return f"{count} races"


def _at_once(one: Agent, other: Agent, action: str, race: int, **arguments: Any) -> list[Reply]:
    """Run an action on two agents at one time, as ranks 0 and 1; every second race with delays inside."""
    common = {**arguments, "at": time.time() + 0.05, "jitter_s": 0.02 * (race % 2)}
    replies = together((one, action, {**common, "rank": 0}), (other, action, {**common, "rank": 1}))
    if any(reply.error == "NoAnswer" for reply in replies):
        raise CheckFailedError("; ".join(map(str, replies)))
    return replies
