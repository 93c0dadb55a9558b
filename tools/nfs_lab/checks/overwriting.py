"""Readers of a checkpoint that another host replaces."""

from __future__ import annotations

from typing import Any

from nfs_lab.agents import together
from nfs_lab.checks.registry import check
from nfs_lab.session import Session

MOUNTS = ("v42", "v3l", "v42noac")
RENAMES = ("rename", "exchange")
Results = dict[str, dict[str, Any]]


def _measure(session: Session, mount: str) -> Results:
    """Publish with overwrite all the time on one host; on the other one process opens and reads, another one loads."""

    def measure() -> Results:
        path, seconds = session.path(mount, "replaced"), 60.0 if session.long else 4.0
        session.value(session.a.call("publish", path=path, step=1))
        before = [session.value(agent.call("count_descriptors")) for agent in (session.b, session.b2)]
        published, read, loaded = together(
            (session.a, "publish_repeatedly", {"path": path, "seconds": seconds, "first_step": 2}),
            (session.b, "read_repeatedly", {"path": path, "seconds": seconds}),
            (session.b2, "load_repeatedly", {"path": path, "seconds": seconds}),
            timeout_s=seconds + 90,
        )
        after = [session.value(agent.call("count_descriptors")) for agent in (session.b, session.b2)]
        return {
            "publish": session.value(published),
            "read": session.value(read),
            "load": session.value(loaded),
            "descriptors": {"before": before, "after": after},
        }

    results: Results = session.measured("overwriting", mount, measure)
    return results


@check("A3", MOUNTS)
def opening_mixes_no_publications(session: Session, mount: str) -> str:
    """`open_checkpoint` and a read of all tensors during overwrites give the values of one publication."""
    read = _measure(session, mount)["read"]
    session.expect(not read["mixed"], f"of {read['reads']} reads, mixed steps: {read['mixed']}")
    return f"{read['reads']} reads"


@check("A1", MOUNTS)
def loading_mixes_no_publications(session: Session, mount: str) -> str:
    """`load_checkpoint` during overwrites gives the values of one publication."""
    load = _measure(session, mount)["load"]
    session.expect(not load["mixed"], f"of {load['reads']} loads, mixed steps: {load['mixed']}")
    return f"{load['reads']} loads"


@check("A2", MOUNTS)
def nothing_is_called_corrupt(session: Session, mount: str) -> None:
    """A replaced checkpoint is never reported as a corrupt one."""
    results = _measure(session, mount)
    found = {**results["read"]["corrupt"], **results["load"]["corrupt"]}
    session.expect(not found, found)


@check("A5, C7", MOUNTS)
def nothing_is_called_missing(session: Session, mount: str) -> None:
    """Neither the checkpoint nor a file of it is reported as missing while it is replaced."""
    results = _measure(session, mount)
    reads = results["read"]["reads"] + results["load"]["reads"]
    found = {**results["read"]["missing"], **results["load"]["missing"]}
    session.expect(not found, f"of {reads} reads: {found}")


@check("H4", MOUNTS)
def readers_get_named_errors(session: Session, mount: str) -> None:
    """A reader during overwrites gets values or an error of statexchange, never a plain OSError."""
    results = _measure(session, mount)
    found = {**results["read"]["unnamed"], **results["load"]["unnamed"]}
    session.expect(not found, found)


@check("H4", MOUNTS)
def readers_leak_no_descriptors(session: Session, mount: str) -> None:
    """Reads that fail during overwrites close all their files."""
    found = _measure(session, mount)["descriptors"]
    leaked = [after > before for after, before in zip(found["after"], found["before"], strict=True)]
    session.expect(not any(leaked), f"open descriptors: {found}")


@check("A5", MOUNTS)
def publisher_never_fails(session: Session, mount: str) -> str:
    """A publisher that overwrites under readers succeeds each time."""
    publish = _measure(session, mount)["publish"]
    session.expect(not publish["errors"] and publish["done"] > 0, publish)
    return f"{publish['done']} publications"


@check("H1", ("v42", "v3l", "v3"))
def overwrite_is_read_after_the_answer(session: Session, mount: str) -> str:
    """After a publisher's answer, the next reader on the other host reads the new publication, not the old one."""
    path, count, wrong = session.path(mount, "handed-over"), session.times(6), []
    for step in range(1, count + 1):
        session.value(session.a.call("publish", path=path, step=step, overwrite=True, kib=16))
        reply = session.b.call("read", path=path)
        if reply.value != [step]:
            wrong.append(f"publication {step}: {reply}")
    session.expect_none(wrong, of=count)
    return f"{count} publications"


@check("A3", ("v42", "v3l", "v3"))
def held_checkpoint_stays_what_it_was(session: Session, mount: str) -> None:
    """A checkpoint held open over an overwrite gives its old values or an error "replaced", never other bytes."""
    before = {"a": ([64, 64], 1.0), "b": ([128, 64], 2.0), "c": ([4096], 3.0)}
    after = {"b": ([64, 64], 11.0), "a": ([256, 64], 12.0), "c": ([4096], 13.0), "d": ([7], 14.0)}
    path = session.path(mount, "held")
    session.value(session.a.call("publish_tensors", path=path, tensors=before))
    session.value(session.b.call("hold", path=path, key=path))
    session.value(session.a.call("publish_tensors", path=path, tensors=after, overwrite=True))
    wrong = []
    for name, found in session.value(session.b.call("read_held", key=path)).items():
        shape, value = before[name.split()[0]]
        old = found == [shape, [value]]
        if not old and not (isinstance(found, str) and "replaced" in found):
            wrong.append(f"{name.split()[0]}: {found}")
    session.expect_none(wrong)


@check("C7", ("v42", "v3l"))
def killed_publisher_leaves_old_or_new(session: Session, mount: str) -> str:
    """A publisher is killed before a mutating call: readers get the old or the new checkpoint.

    The next publication completes, and leaves nothing but the checkpoint.
    """
    folder = session.path(mount, "killed")
    path, wrong = f"{folder}/model", []
    seen = path.replace(f"/run/m/{mount}/", "/run/m/v42noac/")  # no cache hides a target that is gone
    arguments: dict[str, Any] = {"path": path, "step": 1, "overwrite": True, "tensors": 2, "kib": 16}
    session.value(session.a.call("publish", **arguments))
    calls = session.value(session.a.call("list_calls", action="publish", arguments=arguments))
    points = _kill_points(calls, len(calls) if session.long else 8)
    for number, point in enumerate(points):
        old, new = float(2 * number + 2), float(2 * number + 3)
        problem = _publish_completely(session, {**arguments, "step": int(old)}, folder)
        if problem:
            wrong.append(f"the publication after point {number - 1} of {points}: {problem}")
        call: dict[str, Any] = {"action": "publish", "arguments": {**arguments, "step": int(new)}, "number": point}
        killed = session.value(session.a.call("kill_at_call", **call))
        reply = session.b.call("read", path=seen)
        if reply.value not in ([[old], [new]] if killed else [[new]]):
            wrong.append(f"killed before call {point} of {calls}: {reply}")
    problem = _publish_completely(session, {**arguments, "step": 1000}, folder)
    if problem:
        wrong.append(f"the last publication: {problem}")
    session.expect_none(wrong, of=len(points))
    return f"{len(points)} of {len(calls)} kill points"


def _publish_completely(session: Session, arguments: dict[str, Any], folder: str) -> str:
    """Publish once more; return what is wrong with the result, or ""."""
    reply = session.a.call("publish", **arguments)
    if not reply.ok:
        return str(reply)
    left = session.value(session.a.call("names_in", path=folder))
    return "" if left == ["model"] else f"left: {left}"


def _kill_points(calls: list[str], limit: int) -> list[int]:
    """Return the numbers of calls around renames and of others at equal distances, about `limit` in all, in order."""
    chosen: list[int] = []
    for number, call in enumerate(calls):
        if call in RENAMES:
            chosen += [number, number + 1]
    every = max(1, len(calls) // max(1, limit - len(set(chosen))))
    chosen += range(0, len(calls), every)
    return sorted({number for number in chosen if number < len(calls)})
