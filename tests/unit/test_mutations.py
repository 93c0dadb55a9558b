"""Named mutations of whole checkpoints of every kind, each with the verdict that commands must give.

A mutation damages a fresh checkpoint and returns what `scan`, `info` and `verify` must report, or None if it does not
apply to the kind. Where a kind differs for a reason of its own, `EXCEPTIONS` has what is reported of it, and why.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from commands import CommandLine
from mutations import MUTATIONS, NOTHING, WHOLE, Verdict
from sweeps import slow
from whole_checkpoints import KINDS, Kind

from statexchange.report.scan import scan

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # dcp.save of one process

# Nothing says how the ranks divide the tensors, nor how many ranks there are.
PLAIN = ("rank files", "rank files of torch")
DEEPSPEED = ("ZeRO-2", "ZeRO-3", "DeepSpeed pipeline", "Universal Checkpoint")
INCOMPLETE = Verdict("INCOMPLETE", "broken", "INCOMPLETE", ("INCOMPLETE",))
MISSING = Verdict("MISSING ", "broken", "INCOMPLETE", ("INCOMPLETE",))
CORRUPT = Verdict("CORRUPT", "broken")
STEP_ALONE = Verdict("", "", "USAGE", ("USAGE",))  # the directory of the step below is whole, and has to be named


def _all(names: Sequence[str], kinds: Sequence[str], verdict: Verdict) -> dict[tuple[str, str], Verdict]:
    return {(name, kind): verdict for name in names for kind in kinds}


EXCEPTIONS: dict[tuple[str, str], Verdict] = {
    # A config without any weights is no checkpoint; nothing says that there should be some.
    **_all(["lose_the_first_file", "make_a_directory_of_a_file"], ["huggingface", "torch file"], NOTHING),
    # The numbers in the names prove that all files are there.
    **_all(["lose_the_listing"], ["huggingface shards", "torch shards", "export"], WHOLE),
    # Names of tensors and boxes are in the files, so their order does not matter.
    **_all(["swap_two_files"], ["huggingface without index", "torch shards without index", "FSDP1", "verl"], WHOLE),
    # Nothing in these files says whose they are.
    **_all(
        ["swap_two_files"],
        ["dcp", "ZeRO-3", "Universal Checkpoint", "torch_checkpointing"],
        WHOLE,
    ),
    **_all(
        ["copy_a_file_over_another"],
        ["huggingface without index", "torch shards without index", "dcp", "ZeRO-3", "Universal Checkpoint"],
        WHOLE,
    ),
    **_all(
        ["swap_two_files", "copy_a_file_over_another", "lose_the_last_file", "flip_a_bit_in_the_data",
         "lose_the_end_of_a_tensor_to_zeros"],
        PLAIN,
        WHOLE,
    ),
    # .metadata says where each tensor lies, and nothing of what follows.
    **_all(["append_bytes"], ["dcp", "Megatron torch_dist", "Trainer with FSDP", "Lightning"], WHOLE),
    **_all(
        ["make_a_directory_of_a_file"],
        [*PLAIN, "huggingface without index", "torch shards without index", "FSDP1", "Universal Checkpoint",
         "torch_checkpointing", "verl", "Trainer", "accelerate"],
        INCOMPLETE,
    ),
    # Only the names of the other ranks' files say how many there are.
    **_all(
        ["lose_the_first_file", "lose_a_middle_file", "lose_the_last_file", "interrupt_the_download_of_a_file",
         "make_a_directory_of_a_file", "make_a_fifo"],
        ["workspace"],
        INCOMPLETE,
    ),
    # The one file of the model: which others there should be, only its kind says.
    **_all(["lose_the_first_file"], ["Trainer", "accelerate"], INCOMPLETE),
    **_all(["lose_the_last_file"], ["FSDP1", "torch_checkpointing"], INCOMPLETE),  # by the boxes of the others
    ("lose_all_files", "verl"): INCOMPLETE,
    ("empty_a_file", "dcp of safetensors"): CORRUPT,
    ("make_a_dangling_link", "workspace"): Verdict("REFUSED", "broken", "UNSAFE", ("UNSAFE", "INCOMPLETE")),
    # Links are not followed in a workspace.
    **_all(["lose_the_listing"], [*DEEPSPEED, "Megatron legacy"], STEP_ALONE),
    **_all(["cut_the_listing"], DEEPSPEED, INCOMPLETE),  # it names a directory that is not there
    **_all(["lose_all_files"], [*DEEPSPEED, "Megatron legacy"], MISSING),
}  # fmt: skip


def expected(name: str, kind_name: str, verdict: Verdict) -> Verdict:
    """Return the verdict that a mutation of a kind must get."""
    if verdict.values is not None and kind_name in PLAIN:
        verdict = dataclasses.replace(WHOLE, values=verdict.values)
    verdict = EXCEPTIONS.get((name, kind_name), verdict)
    if kind_name in PLAIN and verdict.verify == WHOLE.verify:  # plain tensors of ranks differ, so it is never "ok"
        verdict = dataclasses.replace(verdict, verify=("FINDINGS",))
    return verdict


@cache
def _template(kind: str) -> Path:
    path = Path(mkdtemp(prefix="whole-"))
    KINDS[kind].build(path / "one")
    return path


@pytest.fixture(scope="module", autouse=True)
def _remove_templates() -> Iterator[None]:
    yield
    for kind in KINDS:
        shutil.rmtree(_template(kind), ignore_errors=True)
    _template.cache_clear()


def _findings(verified: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the findings of `verify` in a checkpoint, or in all saves of a job."""
    data = verified["data"]
    return [one for record in data.get("saves", [data]) for one in record["findings"]]


def wrong_verdicts(kind: Kind, verdict: Verdict, path: Path, run: Callable[..., dict[str, Any]]) -> list[str]:
    """Return what commands report of a checkpoint other than its verdict."""
    wrong = []
    scanned = run("scan", path.parent)
    rows = scanned["data"]["checkpoints"]
    place = os.path.normpath(path / (kind.row or kind.at))
    verdicts = [(row["verdict"], row["status"]) for row in rows if os.path.normpath(row["path"]) == place]
    if verdict.beside:
        beside = [one for one in verdicts if re.match(verdict.beside, one[0])]
        if not beside:
            wrong.append(f"scan: {verdicts}, expected {verdict.beside!r} beside it")
        verdicts = [one for one in verdicts if one not in beside]
    if verdict.new:
        new = [row["verdict"] for row in rows if os.path.normpath(row["path"]) == os.path.normpath(path.parent / "new")]
        if len(new) != 1 or not re.match(verdict.new, new[0]):
            wrong.append(f"scan: {new}, expected {verdict.new!r} of the new one")
    if verdict.values is not None:
        name, check = verdict.values
        found = run("verify", path / kind.at, "--values")
        checks = {one.get("check") for one in _findings(found) if one["name"] == name} - {None}
        if checks != {check}:
            wrong.append(f"verify --values: {checks} of {name}, expected {check}")
    if not verdict.scan and verdicts:
        wrong.append(f"scan: {verdicts}, expected no row")
    elif verdict.scan:
        found_verdict, status = verdicts[0] if verdicts else ("no row", "")
        is_right = re.match(verdict.scan, found_verdict) and (verdict.scan == "WHOLE") == (found_verdict == "WHOLE")
        if not is_right or not re.fullmatch(verdict.status, status):
            wrong.append(f"scan: {found_verdict!r} {status}, expected {verdict.scan!r} {verdict.status}")
    info, verified = run("info", path / kind.at), run("verify", path / kind.at)
    if not re.fullmatch(verdict.info, str(info["code"])):
        wrong.append(f"info: {info['code']}, expected {verdict.info}")
    if verified["code"] not in verdict.verify:
        wrong.append(f"verify: {verified['code']}, expected {' or '.join(verdict.verify)}")
    return wrong


def _without_override_rights(run: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Return a function that runs commands during which root, too, may not read files whose mode forbids it."""

    def limited(command: str, path: Path, *options: str) -> dict[str, Any]:
        if os.geteuid() != 0:
            return run(command, path, *options)
        libc = ctypes.CDLL(None, use_errno=True)
        header, rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, rights) == 0
        effective = rights[0]
        rights[0] &= ~(1 << 1 | 1 << 2)  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of this thread
        assert libc.capset(header, rights) == 0
        try:
            return run(command, path, *options)
        finally:
            rights[0] = effective
            assert libc.capset(header, rights) == 0

    return limited


def _share(kind_name: str, every: int) -> list[str]:
    """Return each `every`-th mutation, for each kind from another one on, so that over all kinds none is left out."""
    return list(MUTATIONS)[list(KINDS).index(kind_name) % every :: every]


@pytest.mark.parametrize("every", [12, slow(1)], ids=["some", "all"])
@pytest.mark.parametrize("kind_name", KINDS, ids=lambda text: text.replace(" ", "_"))
def test_a_mutation_gets_the_verdict_that_is_expected(
    kind_name: str, every: int, tmp_path: Path, call: CommandLine, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: object) -> dict[str, Any]:
        return dict(call.json(*arguments)[1])

    kind = KINDS[kind_name]
    applied, wrong = [], {}
    for name in _share(kind_name, every):
        path = tmp_path / name / "one"
        shutil.copytree(_template(kind_name) / "one", path)
        verdict = MUTATIONS[name](kind, path)
        if verdict is None:
            continue
        applied.append(name)
        limited = _without_override_rights(run) if name == "forbid_a_file" else run
        found = wrong_verdicts(kind, expected(name, kind_name, verdict), path, limited)
        if found:
            wrong[name] = found
    with capsys.disabled():
        print(f" {len(applied)} mutations of {kind_name} ", end="")
    assert applied
    assert not wrong, f"{kind_name}: {sorted(wrong)}: {wrong}"


@pytest.mark.parametrize("kind_name", KINDS, ids=lambda text: text.replace(" ", "_"))
def test_without_a_mutation_each_kind_is_whole(kind_name: str) -> None:
    kind, path = KINDS[kind_name], _template(kind_name) / "one"
    rows = {os.path.normpath(row.path): row for row in scan(path)}
    row = rows[os.path.normpath(path / (kind.row or kind.at))]
    assert (row.verdict, row.step) == ("WHOLE", kind.step)
    assert (row.kind or "").startswith(kind.format)
