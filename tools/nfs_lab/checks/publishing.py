"""Publishers that race for one name, that the server maps to other users, and that Ctrl-C ends."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from nfs_lab.agents import Agent, Reply, together
from nfs_lab.checks.registry import check
from nfs_lab.session import Session

RACE_MOUNTS = ("v42", "v3l", "v3")
USER = 1000
INTERRUPTED = 130


@check("C1", RACE_MOUNTS)
def one_of_two_publishers_wins(session: Session, mount: str) -> str:
    """Two hosts publish to a new name at the same time: exactly one wins, and only its bytes are there."""
    count, wrong = session.times(6), []
    for race in range(count):
        folder = session.path(mount, "race")
        replies = _publish_at_once(session, f"{folder}/model", race, overwrite=False)
        problem = _problem(session, folder, replies)
        if problem or sum(reply.ok for reply in replies) != 1:
            wrong.append(f"{problem or 'not exactly one won'} ({' | '.join(map(str, replies))})")
    session.expect_none(wrong, of=count)
    return f"{count} races"


@check("C1", RACE_MOUNTS)
def overwriting_publishers_exclude_each_other(session: Session, mount: str) -> str:
    """Two hosts overwrite one checkpoint at the same time: one wins, or they succeed one after the other.

    The checkpoint is that of one that succeeded, and no other file is left.
    """
    count, wrong = session.times(5), []
    for race in range(count):
        folder = session.path(mount, "overwrite-race")
        session.value(session.a2.call("publish", path=f"{folder}/model", step=1, tensors=4))
        replies = _publish_at_once(session, f"{folder}/model", race, overwrite=True)
        problem = _problem(session, folder, replies)
        if problem:
            wrong.append(f"{problem} ({' | '.join(map(str, replies))})")
    session.expect_none(wrong, of=count)
    return f"{count} races"


def _publish_at_once(session: Session, path: str, race: int, *, overwrite: bool) -> list[Reply]:
    """Publish steps 10 and 20 from two hosts; every second race has random delays before mutating calls."""
    common: dict[str, Any] = {"path": path, "at": time.time() + 0.05, "overwrite": overwrite}
    common["jitter_s"] = 0.02 * (race % 2)
    return together(
        (session.a, "publish_at", {**common, "step": 10}),
        (session.b, "publish_at", {**common, "step": 20}),
    )


def _problem(session: Session, folder: str, replies: list[Reply]) -> str:
    """Return what is wrong after a race, or ""."""
    winners = [[step] for step, reply in zip((10.0, 20.0), replies, strict=True) if reply.ok]
    found = session.b2.call("read", path=f"{folder}/model")
    findings = session.b2.call("verify", path=f"{folder}/model")
    names = session.b2.call("names_in", path=folder)
    if not winners:
        return "both failed"
    if found.value not in winners:
        return f"read {found}"
    if findings.value != []:
        return f"verify: {findings}"
    if names.value != ["model"]:
        return f"left beside it: {names}"
    unnamed = [reply for reply in replies if not reply.ok and not reply.named]
    return f"not an error of statexchange: {unnamed[0]}" if unnamed else ""


@check("C8", ("squash",))
def root_may_overwrite_under_root_squash(session: Session, mount: str) -> None:
    """Under root_squash, where files of root belong to another user, overwriting and saving work."""
    _overwrite_and_save(session, mount, session.a)


@check("C8", ("allsquash",))
def user_may_overwrite_under_all_squash(session: Session, mount: str) -> None:
    """Under all_squash, where files of a user belong to another user, overwriting and saving work."""
    _overwrite_and_save(session, mount, session.new_agent("cA", USER))


def _overwrite_and_save(session: Session, mount: str, agent: Agent) -> None:
    folder = session.path(mount, "squashed")
    session.lab.on(agent.host, f"mkdir -m 777 {folder}")
    failures = []
    for step in (1, 2):
        for action, path in (("publish", f"{folder}/model"), ("save", f"{folder}/save")):
            arguments = {"overwrite": step > 1} if action == "publish" else {}
            reply = agent.call(action, path=path, step=step, **arguments)
            if not reply.ok:
                failures.append(f"{action} {step}: {reply}")
    session.expect_none(failures, of=4)
    session.expect(session.b.call("read", path=f"{folder}/model").value == [2], "another host reads another checkpoint")
    session.expect(agent.call("load_save", path=f"{folder}/save", kib=64).value == [2], "another save is loaded")


@check("C9", ("v42", "v3l"))
def interrupted_saves_stay_loadable(session: Session, mount: str) -> str:
    """Ctrl-C in a loop of saves to one path leaves a whole save.

    After the next save no file and no directory of a broken one is left beside it.
    """
    folder, count, wrong = session.path(mount, "interrupted"), session.times(4), []
    path = f"{folder}/save"
    session.value(session.a.call("save", path=path, step=0))
    for trial in range(count):
        _interrupt(session, "save_repeatedly", {"path": path, "seconds": 20.0})
        loaded, findings = session.b.call("load_save", path=path), session.b.call("verify", path=path)
        if not loaded.ok or len(loaded.value) != 1 or findings.value != []:
            wrong.append(f"trial {trial}: loaded {loaded}; verify {findings}")
    session.expect_none(wrong, of=count)
    session.value(session.a.call("save", path=path, step=1))
    left = session.value(session.a.call("empty_directories", path=folder))
    session.expect(not left, f"empty directories after the next save: {left}")
    hidden = [name for name in session.value(session.a.call("tree", path=folder)) if _is_temporary(name)]
    session.expect(not hidden, f"left after the next save: {hidden}")
    return f"{count} interruptions"


@check("C10", ("v42", "v3l"))
def interrupted_overwrites_leave_nothing(session: Session, mount: str) -> str:
    """Ctrl-C in a loop of overwrites leaves a whole checkpoint, and after the next publication nothing beside it."""
    folder, count, wrong = session.path(mount, "interrupted-overwrites"), session.times(4), []
    path = f"{folder}/model"
    session.value(session.a.call("publish", path=path, step=1))
    for trial in range(count):
        _interrupt(session, "publish_repeatedly", {"path": path, "seconds": 20.0, "first_step": 2})
        reply = session.b.call("read", path=path)
        if not reply.ok or len(reply.value) != 1:
            wrong.append(f"trial {trial}: {reply}")
    session.expect_none(wrong, of=count)
    session.value(session.a.call("publish", path=path, step=1, overwrite=True))
    left = session.value(session.a.call("names_in", path=folder))
    session.expect(left == ["model"], f"left after the next publication: {left}")
    return f"{count} interruptions"


def _interrupt(session: Session, action: str, arguments: dict[str, Any]) -> None:
    after_s = random.uniform(0.1, 0.5)
    status = session.value(session.a.call("interrupt", action=action, arguments=arguments, after_s=after_s))
    session.expect(status == INTERRUPTED, f"{action} ended with exit status {status} on Ctrl-C")


def _is_temporary(path: str) -> bool:
    name = os.path.basename(path)
    return name.startswith(".") or name.endswith((".tmp", ".partial", ".discarded"))
