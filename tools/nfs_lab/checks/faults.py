"""Full disks, mounts whose options weaken guarantees, and a power cut of the server."""

from __future__ import annotations

import time

from nfs_lab.agents import Reply
from nfs_lab.checks.registry import check
from nfs_lab.lab import SERVER
from nfs_lab.session import Session

ENOSPC = 28
SMALL_MOUNTS = ("small42", "small3")


def _fill(session: Session, mount: str) -> tuple[Reply, list[str], int]:
    """Export more than the disk holds; return the answer, the names that are left, and how many descriptors leaked."""

    def measure() -> tuple[Reply, list[str], int]:
        folder = session.path(mount, "full")
        session.lab.on("cA", f"mkdir {folder}")
        session.value(session.a.call("publish", path=f"{folder}/small", step=1, kib=1))
        before = session.value(session.a.call("count_descriptors"))
        reply = session.a.call("publish", path=f"{folder}/model", step=1, tensors=12, kib=1024, shard="1MB")
        after = session.value(session.a.call("count_descriptors"))
        left = session.value(session.a.call("names_in", path=folder))
        session.lab.on("cA", f"rm -rf {folder} 2> /dev/null; true")
        return reply, left, after - before

    result: tuple[Reply, list[str], int] = session.measured("full disk", mount, measure)
    return result


@check("H4", SMALL_MOUNTS)
def full_disk_is_a_storage_error(session: Session, mount: str) -> None:
    """An export to a full disk raises StorageError with errno ENOSPC and the path."""
    reply, _, _ = _fill(session, mount)
    session.expect(reply.error == "StorageError" and reply.errno == ENOSPC and "/run/m/" in reply.text, reply)


@check("H4", SMALL_MOUNTS)
def full_disk_leaves_nothing(session: Session, mount: str) -> None:
    """A failed export leaves no file, also if only close() reports the error."""
    _, left, _ = _fill(session, mount)
    session.expect(left == ["small"], f"left: {left}")


@check("H4", SMALL_MOUNTS)
def full_disk_leaks_no_descriptors(session: Session, mount: str) -> None:
    """A failed export closes all its files."""
    _, _, leaked = _fill(session, mount)
    session.expect(leaked <= 0, f"{leaked} more descriptors are open than before")


@check("H5", ("v42nocto",))
def weak_mount_is_named_once(session: Session, mount: str) -> None:
    """A process that uses a mount without close-to-open consistency warns once and names it."""
    folder = session.path(mount, "weak")
    session.lab.on("cA", f"mkdir {folder}")
    output = session.value(session.new_agent("cA").call("stderr_of_use", folder=folder))
    lines = [line for line in output.splitlines() if "nocto" in line]
    session.expect(len(lines) == 1, f"{len(lines)} lines of stderr name nocto: {output[:300]!r}")
    session.expect(f"/run/m/{mount}" in lines[0], f"the mount is not named: {lines[0]}")


@check("", ("v42",))
def power_cut_of_the_server_loses_nothing(session: Session, mount: str) -> str:
    """The server's power is cut while one process saves and another one publishes.

    Both continue once it is back, and the last save and publication that they acknowledged are read.
    """
    folder, seconds = session.path(mount, "cut"), 4.0
    session.value(session.a.call("save", path=f"{folder}/save", step=1))
    session.value(session.a2.call("publish", path=f"{folder}/model", step=1, kib=64))
    session.a.start("save_repeatedly", path=f"{folder}/save", seconds=seconds)
    session.a2.start("publish_repeatedly", path=f"{folder}/model", seconds=seconds, first_step=2)
    time.sleep(1.5)
    session.lab.kill(SERVER)
    time.sleep(0.2)
    session.lab.boot(SERVER, after_power_cut=True)
    saved, published = session.a.result(150), session.a2.result(150)
    for reply in (saved, published):
        session.expect(not session.value(reply)["errors"], reply)
    for name in ("save", "model"):
        findings = session.value(session.b.call("verify", path=f"{folder}/{name}"))
        session.expect(not findings, f"verify {name}: {findings}")
    loaded, read = session.b.call("load_save", path=f"{folder}/save"), session.b.call("read", path=f"{folder}/model")
    session.expect(loaded.value == [saved.value["done"]], f"last save {saved.value['done']}, loaded {loaded}")
    session.expect(read.value == [published.value["last"]], f"last publication {published.value['last']}, read {read}")
    return f"{saved.value['done']} saves, {published.value['done']} publications"
