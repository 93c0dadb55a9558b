"""Versions of weights: readers on other hosts follow a publisher, late, under leases, and without permission to write.

The third host's clock is an hour ahead. It follows in one check and publishes in another, so that an age by the clock
of a client would show: a version would be removed at once, or never.
"""

from __future__ import annotations

import re
import statistics
import time
from typing import Any

from nfs_lab.agents import Agent
from nfs_lab.checks.registry import check
from nfs_lab.lab import SERVER
from nfs_lab.session import CheckFailedError, Session

MOUNTS = ("v3l", "v40", "v42")
PAUSE_S = 0.3  # of a publisher after each version
# Much less than the 30 to 60 s for which a client of default options caches a directory, and than the product's own
# grace, which is that time. So old listings outlive a retired version here, and what readers may rely on is only that
# a directory that is opened anew is asked for at the server.
GRACE_S = 5.0
LEASE_S = 300.0  # storage/versions.py: a lease that is not touched for so long has ended
USER = 1000
# What a run's directory has on the server once no reader has a lease: versions, marks of retired ones, `latest`.
_EXPECTED = re.compile(r"|\.leases|latest|\.leases/retired-\d{6}|weight_v\d{6}(/[^/.][^/]*)?")

Records = dict[str, dict[str, Any]]


def _clock_offset(agent: Agent) -> float:
    """Return how far the clock of an agent's host is ahead of the driver's, to half of the shortest round trip."""
    trips = []
    for _ in range(15):
        before = time.time()
        there = float(agent.call("clock").value)
        after = time.time()
        trips.append((after - before, there - (before + after) / 2))
    return min(trips)[1]


def _wrong(records: Records, read: list[list[Any]]) -> list[str]:
    """Return what differs from what was published: of each read the number of its version and a digest."""
    wrong = []
    for number, digest, *_ in read:
        if records[str(number)]["digest"] != digest:
            same = [other for other, record in records.items() if record["digest"] == digest]
            wrong.append(f"under number {number} the bytes of {'version ' + same[0] if same else 'no version'}")
    return wrong


def _problems(result: dict[str, Any]) -> str:
    return "; ".join(f"{count} times {text}" for text, count in result["errors"].items())


def _on_server(session: Session, mount: str, path: str) -> list[str]:
    """Return all names in the run's directory, as the server has them."""
    folder = path.replace(f"/run/m/{mount}/", "/run/export/")
    return session.lab.on(SERVER, f"cd {folder} && cd $(ls | grep -v runs) && find . | cut -c3-").split("\n")[:-1]


def _left(session: Session, mount: str, path: str) -> list[str]:
    """Return what lies in the run's directory beside versions and marks of versions: leases, .nfs files, ..."""
    names = _on_server(session, mount, path)
    marks = {name[-6:] for name in names if name.startswith(".leases/retired-")}
    alone = [f"a mark of version {number} alone" for number in marks if f"weight_v{number}" not in names]
    return alone + [name for name in names if _EXPECTED.fullmatch(name) is None]


@check("", MOUNTS)
def followers_get_versions_whole_and_in_order(session: Session, mount: str) -> str:
    """Two hosts follow a publisher of a third: each version is that of its number, newer than the last, up to the last.

    12 versions; 300 in the long form. The detail shows how long after the commit `wait` returned each version.
    """
    count, path = 300 if session.long else 12, session.path(mount, "versions")
    timeout_s = 60.0 + 4.0 * count
    readers = {"cB": session.b, "cC": session.third()}
    offsets = {host: _clock_offset(agent) for host, agent in {**readers, "cA": session.a}.items()}
    for reader in readers.values():
        reader.start("follow_versions", path=path, last=count, timeout_s=timeout_s)
    session.a.start("publish_versions", path=path, count=count, pause_s=PAUSE_S)
    published = session.value(session.a.result(timeout_s + 30))
    records: Records = published["records"]
    results = {host: session.value(reader.result(timeout_s + 30)) for host, reader in readers.items()}
    session.expect(not published["warnings"], "warnings of the publisher:", *published["warnings"])
    details = []
    for host, result in results.items():
        seen = result["seen"]
        session.expect(not result["errors"], f"{host}: {_problems(result)}")
        session.expect_none([f"{host}: {text}" for text in _wrong(records, seen)], of=len(seen))
        numbers = [number for number, *_ in seen]
        session.expect(numbers == sorted(set(numbers)), f"{host}: not in order: {numbers}")
        session.expect(numbers[-1:] == [count], f"{host}: of {count} versions the last is {numbers[-1:]}")
        behind = [at - offsets[host] - (records[str(number)]["commit"] - offsets["cA"]) for number, _, at, _ in seen]
        staged = statistics.median(seconds for *_, seconds in seen)
        details.append(
            f"{host} {len(seen)} seen, {result['late']} late, {statistics.median(behind):.2f} s median,"
            f" {max(behind):.2f} s at most, stage {staged:.2f} s"
        )
    left = _left(session, mount, path)
    session.expect(not left, f"left: {left}")
    seconds = statistics.median(record["seconds"] for record in records.values())
    return f"{count} versions, publish {seconds:.2f} s; {'; '.join(details)}"


@check("", MOUNTS)
def versions_stay_under_leases(session: Session, mount: str) -> str:
    """No version vanishes while a host reads it slowly under a lease, though it was retired long before.

    The publisher keeps one version, and its clock is an hour ahead. In the long form one lease outlasts the time after
    which a lease that is not renewed has ended.
    """
    count, path = 400 if session.long else 25, session.path(mount, "leased")
    publisher, first_hold_s = session.third(), LEASE_S + 40 if session.long else 3 * GRACE_S
    timeout_s = 120.0 + 4.0 * count + first_hold_s
    session.b.start(
        "read_under_leases", path=path, last=count, longest_hold_s=GRACE_S, timeout_s=timeout_s, hold_s=first_hold_s
    )
    session.a.start("read_under_leases", path=path, last=count, longest_hold_s=2 * GRACE_S, timeout_s=timeout_s)
    options: dict[str, Any] = {"keep": 1, "full_every": 2, "grace_s": GRACE_S}
    publisher.start("publish_versions", path=path, count=count, pause_s=2 * PAUSE_S, **options)
    published = session.value(publisher.result(timeout_s))
    results = {host: session.value(agent.result(timeout_s)) for host, agent in (("cB", session.b), ("cA", session.a))}
    session.expect(not published["warnings"], "warnings of the publisher:", *published["warnings"])
    details = []
    for host, result in results.items():
        session.expect(not result["errors"], f"{host}: {_problems(result)}; held {result['held']}")
        wrong = _wrong(published["records"], result["read"])
        session.expect_none([f"{host}: {text}" for text in wrong], of=len(result["read"]))
        longest = max(seconds for *_, seconds in result["held"])
        details.append(
            f"{host} {len(result['read'])} reads under {len(result['held'])} leases, longest {longest:.0f} s,"
            f" {result['late']} refused"
        )
    time.sleep(GRACE_S + 1)
    session.value(publisher.call("publish_versions", path=path, grace_s=GRACE_S))
    last = count + 1
    kept = {f"weight_v{number:06d}" for number in range(last - last % 2 - 1, last + 1)}
    versions = {name for name in _on_server(session, mount, path) if re.fullmatch(r"weight_v\d{6}", name)}
    left = _left(session, mount, path)
    session.expect(not left, f"left: {left}")
    # What the last publish has retired stays for the grace.
    session.expect(bool(kept & versions) and len(versions) <= 4, f"without leases {sorted(versions)} are left")
    return f"{count} versions; {'; '.join(details)}"


@check("", MOUNTS)
def late_readers_of_versions_get_not_found(session: Session, mount: str) -> str:
    """A reader that uses a version after it was retired or removed gets NotFoundError, and never other bytes.

    Another process, on the publisher's host, has all files of the version open, which become .nfs files there; nothing
    is left once it has closed them.
    """
    count, found = 5 if session.long else 1, ""
    for _ in range(count):
        found = _use_late(session, mount)
    return found


def _use_late(session: Session, mount: str) -> str:
    path = session.path(mount, "late")
    options: dict[str, Any] = {"path": path, "keep": 1, "full_every": 1, "grace_s": GRACE_S}
    first = session.value(session.a.call("publish_versions", **options))["records"]["1"]["digest"]
    for agent in (session.b, session.b2, session.a2):
        opened = session.value(agent.call("wait_and_open", path=path, descriptors=agent is session.a2))
        session.expect(opened == [1, first], f"the first version is {first}, {agent.name} has read {opened}")
    warnings = session.value(session.a.call("publish_versions", **options))["warnings"]
    session.expect(not warnings, "warnings of the publisher:", *warnings)
    retired = session.value(session.b2.call("use_late", path=path))
    _expect_refused(session, retired, first, refused=("stage", "wait", "lease"), newest=2)
    time.sleep(GRACE_S + 1)
    while_open = session.value(session.a.call("publish_versions", **options))["warnings"]
    # The files that a process on the publisher's host has open keep their directory, hidden, and that is said.
    unexpected = [text for text in while_open if ".discarded" not in text]
    session.expect(not unexpected, "warnings of the publisher:", *unexpected)
    hidden = [name for name in _on_server(session, mount, path) if ".nfs" in name]
    removed = session.value(session.b.call("use_late", path=path))
    _expect_refused(session, removed, first, refused=("stage", "wait", "lease", "open"), newest=3)
    for agent in (session.b, session.b2, session.a2):
        session.value(agent.call("release", path=path))
    time.sleep(GRACE_S + 1)
    warnings = session.value(session.a.call("publish_versions", **options))["warnings"]
    session.expect(not warnings, "warnings of the publisher after all files were closed:", *warnings)
    left = _left(session, mount, path)
    versions = sorted(name for name in _on_server(session, mount, path) if re.fullmatch(r"weight_v\d{6}", name))
    session.expect(not left, f"left: {left}; while they were open: {hidden}")
    # Version 3 was retired by the last publish.
    session.expect(versions == ["weight_v000003", "weight_v000004"], f"versions: {versions}")
    return (
        f"{len(hidden)} .nfs files and {len(while_open)} warnings while they were open;"
        f" opened before: {removed['opened before']:.60}"
    )


def _expect_refused(session: Session, found: dict[str, Any], first: str, refused: tuple[str, ...], newest: int) -> None:
    for way, result in found.items():
        if way in refused:
            session.expect(result.startswith("NotFoundError:"), f"{way}: {result}")
        elif way == "newest":
            session.expect(result == newest, f"the newest version is {newest}, found {result}")
        else:  # it is still there, or was opened before: the right bytes, or an error
            session.expect(result == first or "Error: " in result, f"{way}: {result}, not the bytes {first}")


@check("", ("v3l", "v42"))
def user_without_leases_follows_versions(session: Session, mount: str) -> str:
    """A reader of another user, who may not write a lease in the publisher's directory, takes versions all the same."""
    count, path = 3, session.path(mount, "unleased")
    reader = session.new_agent("cB", USER)
    reader.start("follow_versions", path=path, last=count, timeout_s=60)
    published = session.value(session.a.call("publish_versions", path=path, count=count, pause_s=PAUSE_S))
    result = session.value(reader.result(90))
    session.expect(not result["errors"], _problems(result))
    session.expect_none(_wrong(published["records"], result["seen"]), of=len(result["seen"]))
    if not result["seen"] or result["seen"][-1][0] != count:
        raise CheckFailedError(f"the last version was not reached: {result}")
    return f"{len(result['seen'])} of {count} versions"
