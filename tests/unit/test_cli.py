import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from commands import CommandLine, command_environment
from json_schemas import validator
from programs import require_mounts
from safetensors.numpy import save_file
from scripts import warm_program
from stored import contents_of, flip_bit, write_raw
from warm_python import warm_python
from workspaces import filled, write_round

import statexchange
from statexchange import demo
from statexchange.cli import progress as progress_module
from statexchange.cli.commands import COMMANDS
from statexchange.cli.main import cli
from statexchange.cli.output import EXIT_CODES, Output, most_severe
from statexchange.cli.progress import Progress
from statexchange.errors import CorruptError, IncompleteError, ReplicaError, StorageError
from statexchange.sharding.shards import Box, Shard
from statexchange.storage.tensorfile import ShardData
from statexchange.testing import run_ranks
from statexchange.units import format_ranks, format_seconds, printable

pytestmark = pytest.mark.usefixtures("plain_environment")


def shell(*arguments: object, **more: str) -> tuple[int, str, str]:
    """Run the command line as a process, a fork of a warm Python; return exit code, stdout and stderr."""
    command = [warm_python("commands"), "-m", "statexchange", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=command_environment(**more), timeout=60)
    return done.returncode, done.stdout, done.stderr


def held(
    name: str, dtype: str, shape: Sequence[int], offsets: Sequence[int], size: Sequence[int], fill: int
) -> ShardData:
    """Return what a rank holds of a tensor: one box, whose random bytes have the seed `fill`."""
    shard = Shard(name, dtype, tuple(shape), (Box(tuple(offsets), tuple(size)),))
    return filled(shard, Random(fill).randbytes(shard.nbytes))


def rank_tensors(rank: int) -> list[ShardData]:
    return [
        held("rows.weight", "F32", (8, 6), (2 * rank, 0), (2, 6), rank),
        held("columns.weight", "BF16", (4, 8), (0, 2 * rank), (4, 2), 10 + rank),
        held("norm.weight", "F32", (6,), (0,), (6,), 99),
    ]


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return write_round(tmp_path / "ws", *map(rank_tensors, range(4)))


@pytest.fixture
def workspace(tmp_path: Path, files: list[Path]) -> Path:
    return tmp_path / "ws"


# The commands info and ls


@pytest.mark.parametrize("command", ["info", "ls"])
def test_info_and_ls_import_nothing_slow(workspace: Path, command: str) -> None:
    program = (
        "import sys\nfrom statexchange.cli.main import main\n"
        f"try: main([{command!r}, {os.fspath(workspace)!r}])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print(*{'torch', 'numpy', 'filelock', 'hashlib', 'statexchange.conversions.plan'} & set(sys.modules), "
        "file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=command_environment(), timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "\n")


def test_help_imports_no_command() -> None:
    program = "import sys\nfrom statexchange.cli.main import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=command_environment())
    modules = done.stdout.split()
    assert "statexchange.cli.main" in modules
    assert {f"statexchange.cli.{name}" for name in COMMANDS} & set(modules) == set()


IN_THE_END = """
import atexit, gc, os, sys
atexit.register(lambda: print(os.environ["OPENBLAS_NUM_THREADS"], gc.isenabled(), file=sys.stderr))
from statexchange.__main__ import main
main()
"""


@pytest.mark.parametrize(("place", "collects"), [("{}", False), ("file://{}", True)])
def test_a_command_has_no_blas_threads_and_collects_garbage_only_with_a_url(
    workspace: Path, place: str, collects: bool
) -> None:
    run = [sys.executable, "-c", IN_THE_END, "info", place.format(workspace)]
    for more in ({}, {"OPENBLAS_NUM_THREADS": "3"}):
        environment = command_environment(**more)
        if not more:
            environment.pop("OPENBLAS_NUM_THREADS", None)
        done = subprocess.run(run, capture_output=True, text=True, env=environment, timeout=60)
        assert (done.returncode, done.stderr) == (0, f"{more.get('OPENBLAS_NUM_THREADS', 1)} {collects}\n")


def test_info_answers_before_torch_could_have_been_imported(workspace: Path) -> None:
    def seconds(*command: str) -> float:
        """Return the processor time of a program."""
        with subprocess.Popen(
            [sys.executable, *command], env=command_environment(), stdout=subprocess.DEVNULL
        ) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return used.ru_utime + used.ru_stime

    info = min(seconds("-m", "statexchange", "info", os.fspath(workspace)) for _ in range(2))
    assert info < seconds("-c", "import torch") / 3


def test_info_shows_kind_counts_dtypes_and_ranks_of_a_workspace(workspace: Path) -> None:
    code, out, err = shell("info", workspace)
    assert (code, err) == (0, "")
    fields = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert fields["kind"] == "workspace"
    assert fields["tensors"] == "3"
    assert fields["parameters"] == "86"
    assert fields["bytes"] == "280 B (280 bytes)"
    assert fields["dtypes"] == "BF16 1, F32 2"
    assert fields["files"].startswith("4, ")
    assert fields["ranks"] == "4 of 4: 0-3"
    assert fields["digests"].startswith("known")
    assert "\x1b" not in out


def test_info_as_json_has_integers_for_bytes(call: CommandLine, workspace: Path) -> None:
    code, envelope = call.json("info", workspace)
    assert code == 0
    data = envelope["data"]
    assert (data["nbytes"], data["num_parameters"], data["ranks"], data["problems"]) == (
        280,
        86,
        [0, 1, 2, 3],
        [],
    )


def test_ls_in_a_pipe_is_a_table_with_tabs(workspace: Path) -> None:
    code, out, err = shell("ls", workspace)
    assert (code, err) == (0, "")
    header, *rows = (line.split("\t") for line in out.splitlines())
    assert header == ["NAME", "DTYPE", "SHAPE", "BYTES", "HELD-BY"]
    assert sorted(rows) == [
        ["columns.weight", "BF16", "[4,8]", "64", "0-3"],
        ["norm.weight", "F32", "[6]", "24", "0-3"],
        ["rows.weight", "F32", "[8,6]", "192", "0-3"],
    ]


def test_ls_is_aligned_and_bold_on_a_terminal_only(
    call: CommandLine, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _, out, _ = call("ls", workspace)
    assert out.splitlines()[0].startswith("\x1b[1mNAME  ")
    assert "192 B" in out
    monkeypatch.setenv("NO_COLOR", "1")
    _, plain, _ = call("ls", workspace)
    assert "\x1b" not in plain
    monkeypatch.undo()
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert call("ls", workspace, "--format", "human")[1] == plain
    assert "\t" not in plain


def test_ls_as_json_lines_ends_with_a_summary(call: CommandLine, workspace: Path) -> None:
    code, out, _ = call("ls", workspace, "--format", "jsonl", "--include", "*s.weight")
    *rows, summary = map(json.loads, out.splitlines())
    assert code == 0
    assert [(row["type"], row["name"], row["nbytes"]) for row in rows] == [
        ("tensor", "rows.weight", 192),
        ("tensor", "columns.weight", 64),
    ]
    assert (summary["type"], summary["ok"], summary["data"]["num_tensors"]) == ("summary", True, 2)
    assert len(call.json("ls", workspace)[1]["data"]["tensors"]) == 3


def test_a_pattern_that_matches_nothing_is_a_usage_error(call: CommandLine, workspace: Path) -> None:
    code, out, err = call("ls", workspace, "--include", "nothing*")
    assert (code, out) == (2, "")
    assert "'nothing*' matches no tensor" in err


def test_ls_shows_question_marks_for_a_tensor_of_a_missing_file(call: CommandLine, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    weight_map = {"scalar": "model-00001-of-00002.safetensors", "w": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save_file({"scalar": np.array(1, np.float32)}, folder / "model-00001-of-00002.safetensors")
    code, out, _ = call("ls", folder)
    assert code == 5
    assert out.splitlines()[1:] == [
        "scalar\tF32\t[]\t4\tmodel-00001-of-00002.safetensors",
        "w\t?\t?\t?\tmodel-00002-of-00002.safetensors",
    ]
    data = call.json("ls", folder)[1]["data"]
    assert [(row["dtype"], row["shape"], row["nbytes"]) for row in data["tensors"]] == [
        ("F32", [], 4),
        ("?", None, None),
    ]
    assert data["nbytes"] == 4


def test_control_characters_in_names_are_escaped(call: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, {"evil\u202e\u200bname": ("U8", (2,), b"ab")})
    assert "evil\\u202e\\u200bname\tU8" in call("ls", path)[1]
    _, out, _ = call("ls", path, "--json")
    assert out.isascii()
    assert json.loads(out)["data"]["tensors"][0]["name"] == "evil\u202e\u200bname"
    assert printable("a\tb\x1b[0m\n\ud800é") == "a\\tb\\x1b[0m\\n\\ud800é"


def test_characters_that_stdout_cannot_encode_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, {"größe": ("U8", (2,), b"ab")})
    code, out, _ = shell("ls", path, PYTHONIOENCODING="ascii")
    assert code == 0
    assert "gr\\xf6\\xdfe" in out


def test_a_reader_that_closes_the_pipe_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, {f"layer.{number:05d}.{'x' * 60}": ("U8", (0,), b"") for number in range(5000)})
    command = f"{warm_python('commands')} -m statexchange ls {path} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=command_environment(), timeout=60
    )
    assert done.stdout == "NAME\tDTYPE\tSHAPE\tBYTES\tHELD-BY\n0\n"
    assert done.stderr == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("form", ["human", "json"])
def test_output_that_cannot_be_written_is_an_io_error(workspace: Path, form: str, unbuffered: str) -> None:
    command = [warm_python("commands"), "-m", "statexchange", "info", os.fspath(workspace), "--format", form]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=command_environment(PYTHONUNBUFFERED=unbuffered),
            timeout=60,
        )
    assert done.returncode == 8
    assert done.stderr == "error: cannot write the output: No space left on device\n"


# The commands verify and merge


def test_verify_has_no_findings_in_a_whole_checkpoint(call: CommandLine, workspace: Path) -> None:
    code, out, err = call("verify", workspace)
    assert (code, err) == (0, "")
    assert "3 tensors in 12 regions, " in out
    assert out.splitlines()[-1].startswith("ok: ")
    _, envelope = call.json("verify", workspace)
    assert envelope["data"]["findings"] == []
    assert envelope["data"]["num_unproven"] == 0


def test_verify_warns_of_tensors_without_a_digest(call: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_raw(path, {"a": ("U8", (2,), b"ab")})
    code, _, err = call("verify", path)
    assert code == 0
    assert err.startswith("warning: no digest is known of 1 tensor: its bytes cannot be checked")
    assert call.json("verify", path)[1]["warnings"]


def test_every_command_reads_what_merge_writes(call: CommandLine, workspace: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    out = tmp_path / "out"
    options = (
        "--exclude",
        "norm*",
        "--rename",
        r"\.weight$=.w",
        "--files-from",
        config,
        "--max-shard-size",
        "200B",
    )
    code, envelope = call.json("merge", workspace, out, "--dry-run", *options)
    assert (code, envelope["data"]["dry_run"], out.exists()) == (0, True, False)
    code, text, err = call("merge", workspace, out, "--threads", "2", *options)
    assert (code, err) == (0, "")
    assert f"merged 2 tensors, 256 B, into {out}" in text
    assert sorted(os.listdir(out)) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "statexchange.json",
    ]
    assert call("verify", out)[0] == 0
    assert "digests     known" in call("info", out)[1]
    names = [row["name"] for row in call.json("ls", out)[1]["data"]["tensors"]]
    assert sorted(names) == ["columns.w", "rows.w"]


def test_a_rename_without_a_replacement_is_refused(call: CommandLine, workspace: Path, tmp_path: Path) -> None:
    code, _, err = call("merge", workspace, tmp_path / "out", "--rename", "abc")
    assert code == 2
    assert "'abc' is not REGEX=REPL" in err


@pytest.mark.parametrize("command", [["merge", "a", "b"], ["demo"]])
def test_under_a_launcher_only_rank_0_writes(command: list[str]) -> None:
    code, out, err = shell(*command, RANK="2", WORLD_SIZE="4")
    assert (code, out) == (7, "")
    assert err == "error: only rank 0 runs this command, and WORLD_SIZE is 4: start it once [rank 2]\n"


# Bad arguments


def test_bad_arguments_are_usage_errors(call: CommandLine) -> None:
    code, out, err = call("info")
    assert (code, out) == (2, "")
    assert err == "error: Missing argument 'PATH...'.\nhint: statexchange info --help\n"
    assert call("nonsense")[0] == 2
    assert call("demo", "-n", "0")[0] == 2
    code, out, err = call()
    assert (code, out) == (2, "")
    assert "Commands:" in err


@pytest.mark.parametrize("asked", [["--json"], ["--format", "json"], ["--format=json"]])
def test_usage_errors_are_json_if_requested(call: CommandLine, asked: list[str]) -> None:
    code, out, err = call("info", *asked, "--no-such-option")
    envelope = json.loads(out)
    assert (code, err, envelope["ok"], envelope["code"]) == (2, "", False, "USAGE")
    assert "--no-such-option" in envelope["error"]["message"]


def test_help_lists_every_command(call: CommandLine) -> None:
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out[out.index("Commands:") :].splitlines()[1:]]
    assert names == list(COMMANDS)
    assert call("merge", "-h")[0] == 0
    assert statexchange.__version__ in call("--version")[1]


# Broken sources


def test_an_absent_path_is_not_found_by_any_command(workspace: Path, tmp_path: Path) -> None:
    for arguments in (
        ["info", "nowhere"],
        ["ls", "nowhere"],
        ["verify", "nowhere"],
        ["merge", "nowhere", tmp_path / "out"],
    ):
        code, out, err = shell(*arguments)
        assert (code, out) == (3, ""), arguments
        assert err == f"error: no such path [{Path.cwd() / 'nowhere'}]\n"
    code, out, _ = shell("info", "nowhere", "--json")
    assert code == 3
    assert json.loads(out)["error"] == {
        "code": "NOT_FOUND",
        "message": "no such path",
        "rank": None,
        "name": None,
        "path": str(Path.cwd() / "nowhere"),
        "expected": None,
        "found": None,
    }


def test_a_directory_without_a_checkpoint_is_not_found_and_left_alone(call: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for command in ("info", "ls", "verify"):
        code, _, err = call(command, tmp_path)
        assert code == 3
        assert os.fspath(tmp_path) in err
    assert call("merge", tmp_path, tmp_path / "out")[0] == 3
    assert os.listdir(tmp_path) == ["notes.txt"]


def refused(call: CommandLine, workspace: Path, *, code: int, says: Sequence[str]) -> str:
    """Check that merging prints all of `says`, exits with `code` and changes nothing; return the outcome of verify."""
    before, beside = contents_of(workspace), sorted(os.listdir(workspace.parent))
    got, out, err = call("merge", workspace, workspace.parent / "out")
    assert (got, out) == (code, "")
    for text in says:
        assert text in err, (text, err)
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert contents_of(workspace) == before
    assert sorted(os.listdir(workspace.parent)) == beside
    got, out, _ = call("verify", workspace)
    assert got == code
    return out


def test_a_missing_file_of_a_rank_is_incomplete_and_names_the_rank(
    call: CommandLine, workspace: Path, files: list[Path]
) -> None:
    files[2].unlink()
    says = ["ranks [2] of 4 have no file", "rank 2", os.fspath(files[2].parent), "hint: statexchange verify"]
    found = refused(call, workspace, code=5, says=says)
    assert "INCOMPLETE  ranks [2] of 4 have no file [rank 2, " in found
    assert "tensor 'rows.weight'" in found
    code, out, err = call("info", workspace)
    assert code == 5
    assert "3 of 4: 0-1, 3" in out
    assert err.startswith("warning: ranks [2] of 4 have no file [rank 2, ")
    code, out, _ = call("ls", workspace)
    assert code == 5
    assert "rows.weight\tF32\t[8,6]\t192\t0-1, 3" in out
    code, envelope = call.json("info", workspace)
    assert (envelope["code"], envelope["error"]["rank"], envelope["data"]["problems"][0]["rank"]) == (
        "INCOMPLETE",
        2,
        2,
    )


def test_a_truncated_file_is_corrupt_and_named(call: CommandLine, workspace: Path, files: list[Path]) -> None:
    with files[1].open("r+b") as file:
        file.truncate(files[1].stat().st_size - 5)
    found = refused(call, workspace, code=4, says=["truncated", os.fspath(files[1])])
    assert found.count("CORRUPT") == 1
    code, out, err = call("info", workspace)
    assert code == 4
    assert "kind " in out
    assert os.fspath(files[1]) in err


def test_a_flipped_bit_is_corrupt_and_names_rank_and_tensor(
    call: CommandLine, workspace: Path, files: list[Path]
) -> None:
    flip_bit(files[3], -1)
    found = refused(call, workspace, code=4, says=["digest", "rank 3", "tensor 'columns.weight'", os.fspath(files[3])])
    assert "1 finding" in found
    code, out, _ = call("verify", workspace, "--format", "jsonl")
    finding, summary = map(json.loads, out.splitlines())
    assert (finding["type"], finding["code"], finding["rank"], finding["name"]) == (
        "finding",
        "CORRUPT",
        3,
        "columns.weight",
    )
    assert len(finding["expected"]) == len(finding["found"]) == 32
    assert (code, summary["code"], summary["data"]["num_tensors"]) == (4, "CORRUPT", 3)
    assert call("info", workspace)[0] == 0, "headers alone cannot tell"


def test_a_region_that_two_ranks_claim_is_corrupt_and_named(call: CommandLine, tmp_path: Path) -> None:
    one = [held("w", "F32", (4, 4), (0, 0), (3, 4), 1)]
    other = [held("w", "F32", (4, 4), (2, 0), (2, 4), 2)]
    write_round(tmp_path / "ws", one, other)
    found = refused(
        call, tmp_path / "ws", code=4, says=["claimed twice", "rank 0", "rank 1", "tensor 'w'", "[2:3, 0:4]"]
    )
    assert "CORRUPT     region [2:3, 0:4]" in found


def test_a_dtype_that_differs_between_ranks_is_corrupt_and_named(call: CommandLine, tmp_path: Path) -> None:
    one, other = [held("w", "F32", (4,), (0,), (2,), 1)], [held("w", "BF16", (4,), (2,), (2,), 2)]
    write_round(tmp_path / "ws", one, other)
    refused(call, tmp_path / "ws", code=4, says=["dtype", "tensor 'w'", "rank 1", "expected F32, found BF16"])


def test_a_region_that_no_rank_holds_is_incomplete_and_named(call: CommandLine, tmp_path: Path) -> None:
    write_round(tmp_path / "ws", [held("w", "F32", (4,), (0,), (2,), 1)], [])
    refused(call, tmp_path / "ws", code=5, says=["no rank holds region [2:4]", "tensor 'w'"])


def test_copies_that_differ_are_findings(call: CommandLine, tmp_path: Path) -> None:
    write_round(tmp_path / "ws", *[[held("w", "F32", (4,), (0,), (4,), fill)] for fill in (1, 2)])
    code, out, _ = call("verify", tmp_path / "ws")
    assert code == 1
    assert "FINDINGS    ranks 0 and 1 hold different values" in out
    code, _, err = call("merge", tmp_path / "ws", tmp_path / "out")
    assert code == EXIT_CODES[ReplicaError.code]
    assert "--replicas root" in err
    assert call("merge", tmp_path / "ws", tmp_path / "out", "--replicas", "root")[0] == 0


def test_an_existing_target_is_replaced_with_overwrite_unless_it_has_files_of_others(
    call: CommandLine, workspace: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert call("merge", workspace, out)[0] == 0
    before = contents_of(out)
    code, _, err = call("merge", workspace, out, "--exclude", "norm*")
    assert code == 7
    assert "--overwrite" in err
    assert os.fspath(out) in err
    assert contents_of(out) == before
    assert call("merge", workspace, out, "--exclude", "norm*", "--overwrite")[0] == 0
    (out / "mine.txt").write_text("keep")
    code, _, err = call("merge", workspace, out, "--overwrite")
    assert code == 7
    assert "'mine.txt'" in err
    assert (out / "mine.txt").exists()
    assert sorted(os.listdir(tmp_path)) == ["out", "ws"]


@pytest.fixture
def namespace(tmp_path: Path) -> Iterator[Path]:
    """Return a directory to mount on; mounts that `in_namespace` makes are not visible outside."""
    require_mounts()
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    yield mounted
    assert os.listdir(mounted) == []


def in_namespace(script: str) -> str:
    done = subprocess.run(
        ["unshare", "-m", "bash", "-c", f"set -e; {script}"],
        capture_output=True,
        text=True,
        env=command_environment(),
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_full_disk_leaves_what_was_there(call: CommandLine, namespace: Path, workspace: Path, tmp_path: Path) -> None:
    assert call("merge", workspace, tmp_path / "old")[0] == 0
    write_round(tmp_path / "big", [held("w", "U8", (2 << 20,), (0,), (2 << 20,), 1)])
    sx = f"{sys.executable} -m statexchange"
    output = in_namespace(
        f"mount -t tmpfs -o size=1m tmpfs {namespace}; cp -r {tmp_path}/old {namespace}/out; "
        f"{sx} merge {tmp_path}/big {namespace}/out --overwrite 2>&1 || echo exit $?; ls -A {namespace}; "
        f"diff -r {tmp_path}/old {namespace}/out && echo same"
    )
    error, code, *rest = output.splitlines()
    assert error.startswith("error: cannot reserve 2097")
    assert "No space left on device" in error
    assert f"{namespace}/.out." in error
    assert [code, *rest] == ["exit 8", "out", "same"]


def test_a_dry_run_refuses_a_target_that_cannot_be_written(namespace: Path, workspace: Path, tmp_path: Path) -> None:
    """It has no room, also below directories that do not exist yet, or its file system is read-only."""
    write_round(tmp_path / "big", [held("w", "U8", (2 << 20,), (0,), (2 << 20,), 1)])
    sx = f"{sys.executable} -m statexchange"
    output = in_namespace(
        f"mount -t tmpfs -o size=1m tmpfs {namespace}; "
        f"{sx} merge {tmp_path}/big {namespace}/out --dry-run 2>&1 || echo exit $?; "
        f"{sx} merge {tmp_path}/big {namespace}/a/b/out --dry-run 2>&1 || echo exit $?; ls -A {namespace}; "
        f"mount -o remount,ro {namespace}; {sx} merge {workspace} {namespace}/out --dry-run 2>&1 || echo exit $?"
    )
    full, one, fuller, other, read_only, last = output.splitlines()
    assert [one, other, last] == ["exit 8"] * 3
    assert "No space left on device" in full
    assert "No space left on device" in fuller
    assert "Read-only file system" in read_only


DIE_WHILE_PUBLISHING = """
import os, sys
from statexchange.checkpoint.publication import Publication
from statexchange.sharding.plan import RankShards, plan_merge
from statexchange.sharding.shards import Shard, full_box

plan = plan_merge([RankShards(0, [Shard("w", "U8", (2 << 20,), (full_box((2 << 20,)),))])])
opened = Publication(sys.argv[1], plan, source="test").create(plan.files[0])
opened.write(bytes(2 << 20), len(opened.header) + plan.files[0].tensors[0].begin)
os._exit(0)
"""


def test_a_dry_run_counts_the_room_that_a_dead_publisher_left(namespace: Path, tmp_path: Path) -> None:
    write_round(tmp_path / "big", [held("w", "U8", (2 << 20,), (0,), (2 << 20,), 1)])
    (tmp_path / "die.py").write_text(DIE_WHILE_PUBLISHING)
    merge = f"{sys.executable} -m statexchange merge {tmp_path}/big {namespace}"
    output = in_namespace(
        f"mount -t tmpfs -o size=3m tmpfs {namespace}; {sys.executable} {tmp_path}/die.py {namespace}/out; "
        f"{merge}/other --dry-run >&2 || echo exit $?; {merge}/out --dry-run >&2 && {merge}/out >&2 && echo merged"
    )
    assert output.splitlines() == ["exit 8", "merged"]


def test_a_tensor_of_an_unknown_dtype_is_shown_and_not_merged(call: CommandLine, tmp_path: Path) -> None:
    write_raw(tmp_path / "x.safetensors", {"odd": ("Q4", (2, 2), b"ab"), "w": ("U8", (2,), b"cd")})
    code, out, err = call("info", tmp_path / "x.safetensors")
    assert (code, "Q4 1, U8 1" in out) == (0, True)
    assert "warning: tensors that cannot be read: odd (dtype Q4 is not supported" in err
    code, out, err = call("ls", tmp_path / "x.safetensors")
    assert (code, "odd\tQ4\t[2,2]" in out, "odd (dtype Q4" in err) == (0, True, True)
    assert call.json("info", tmp_path / "x.safetensors")[1]["data"]["unsupported"].keys() == {"odd"}
    assert call("verify", tmp_path / "x.safetensors")[0] == 7
    assert call("merge", tmp_path / "x.safetensors", tmp_path / "out")[0] == 7
    code, _, err = call("merge", tmp_path / "x.safetensors", tmp_path / "out", "--exclude", "odd")
    assert (code, "matches no tensor" in err) == (0, False)


def test_a_merge_into_a_read_only_directory_is_an_io_error(namespace: Path, workspace: Path) -> None:
    sx = f"{sys.executable} -m statexchange"
    output = in_namespace(
        f"mount -t tmpfs tmpfs {namespace}; touch {namespace}/before; mount -o remount,ro {namespace}; "
        f"{sx} merge {workspace} {namespace}/out 2>&1 || echo exit $?; ls -A {namespace}"
    )
    error, code, *rest = output.splitlines()
    assert error.startswith("error: cannot ")
    assert "Read-only file system" in error
    assert os.fspath(namespace) in error
    assert [code, *rest] == ["exit 8", "before"]


# Interruptions and faults


@pytest.fixture
def memory_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        yield Path(directory)


def test_ctrl_c_in_a_merge_leaves_nothing(memory_directory: Path) -> None:
    if shutil.disk_usage(memory_directory).free < 2 << 30:
        pytest.skip("an interruption needs a merge that takes a while: 1 GiB of room in memory")
    shard = Shard("w", "U8", (400 << 20,), (Box((0,), (400 << 20,)),))
    write_round(memory_directory / "ws", [filled(shard, bytes(shard.nbytes))])
    before = sorted(os.listdir(memory_directory))
    program = (
        "from statexchange.cli.main import main\n"
        f"main(['merge', {os.fspath(memory_directory / 'ws')!r}, {os.fspath(memory_directory / 'out')!r}])"
    )
    merging = subprocess.Popen(
        [warm_python("commands"), "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=command_environment(),
    )
    deadline = time.monotonic() + 20
    while not any(name.endswith(".partial") for name in os.listdir(memory_directory)):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    merging.send_signal(signal.SIGINT)
    out, err = merging.communicate(timeout=20)
    assert (merging.returncode, out, err) == (130, "", "error: interrupted\n")
    assert sorted(os.listdir(memory_directory)) == before


def test_an_internal_error_asks_for_a_report(
    call: CommandLine, monkeypatch: pytest.MonkeyPatch, workspace: Path
) -> None:
    def broken(_path: str, **_: object) -> None:
        raise RuntimeError("the moon is full")

    monkeypatch.setattr("statexchange.report.summary.summarize", broken)
    code, out, err = call("info", workspace)
    assert (code, out) == (70, "")
    assert "Traceback" in err
    assert "error: the moon is full\nhint: this is a bug in statexchange " in err
    code, envelope = call.json("info", workspace)
    assert (code, envelope["error"]["message"]) == (70, "the moon is full")


def inverts() -> None:
    np.linalg.inv(np.zeros((2, 2)))


@pytest.mark.parametrize("where", ["here", "on ranks"])
def test_an_error_in_another_package_may_be_its_bug(
    call: CommandLine, monkeypatch: pytest.MonkeyPatch, workspace: Path, where: str
) -> None:
    look = inverts if where == "here" else lambda: run_ranks(inverts, 2)
    monkeypatch.setattr("statexchange.report.summary.summarize", lambda _path, **_: look())
    code, out, err = call("info", workspace)
    assert (code, out) == (70, "")
    assert "LinAlgError: Singular matrix" in err
    assert ", or in the package at the end of the text above: report it, " in err.splitlines()[-1]


INTERRUPTED = """
import runpy, sys

interrupted = sys.argv.pop(1)

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv[0] = "-m"  # as python -m has it while the package is imported
runpy.run_module("statexchange", run_name="__main__")
"""


@pytest.mark.parametrize(
    "module",
    ["statexchange.lazy", "statexchange.errors", "click", "statexchange.cli.main", "statexchange.cli.info", "xxhash"],
)
def test_ctrl_c_while_modules_are_imported_exits_with_130(module: str, workspace: Path) -> None:
    run = [sys.executable, "-c", INTERRUPTED, module, "verify" if module == "xxhash" else "info", workspace]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, env=command_environment())
    assert (done.returncode, done.stdout, done.stderr.removeprefix("error: interrupted\n")) == (130, "", "")


def test_an_os_error_is_not_called_a_bug_of_ours(
    call: CommandLine, monkeypatch: pytest.MonkeyPatch, workspace: Path
) -> None:
    def refuse(_path: str, **_: object) -> None:
        raise PermissionError(13, "Permission denied", "/secret")

    monkeypatch.setattr("statexchange.report.summary.summarize", refuse)
    code, _, err = call("info", workspace)
    assert (code, err) == (8, "error: cannot continue: Permission denied [/secret]\n")


# Progress


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress_module.time, "monotonic", clock)
    return clock


def test_progress_in_a_log_is_a_line_each_half_minute(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("w") as log, Progress(Output(), "merge") as progress:
        monkeypatch.setattr(sys, "stderr", log)
        for second in range(65):
            clock.now = 100.0 + second
            progress(second * 10**6, 100 * 10**6)
    assert (tmp_path / "log").read_text().splitlines() == [
        "merge  30.0 MB of 100 MB (30%)  1.00 MB/s  1 min 10 s left",
        "merge  60.0 MB of 100 MB (60%)  1.00 MB/s  40 s left",
    ]


def test_progress_on_a_terminal_is_one_line_that_is_erased(
    clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress(Output(), "verify") as progress:
        progress(1, 10)
        clock.now += 2
        progress(5 * 10**6, 10 * 10**6)
        progress(6 * 10**6, 10 * 10**6)
    _, err = capsys.readouterr()
    assert err == "\rverify  5.00 MB of 10.0 MB (50%)  2.50 MB/s  2 s left\x1b[K\r\x1b[K"


def test_numbers_are_formatted_for_people() -> None:
    assert [format_seconds(s) for s in (0.0123, 9, 59.4, 185, 7800, 273_600)] == [
        "0.012 s",
        "9 s",
        "59 s",
        "3 min 05 s",
        "2 h 10 min",
        "3 d 04 h",
    ]
    assert format_ranks([3, 1, 0, 2, 7]) == "0-3, 7"
    assert format_ranks([]) == ""


def test_the_most_severe_finding_is_the_exit_code() -> None:
    replica, missing, broken = ReplicaError("r"), IncompleteError("i"), CorruptError("c")
    assert most_severe([replica, missing, broken]) is broken
    assert most_severe([replica, missing]) is missing
    assert most_severe([replica]) is replica
    assert most_severe([]) is None
    assert all(cls.code in EXIT_CODES for cls in (ReplicaError, IncompleteError, CorruptError, StorageError))


# The demo


def test_demo_without_torch_names_the_command_that_installs_it() -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom statexchange.cli.main import main\nmain(['demo'])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=command_environment(), timeout=60
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert 'pip install "statexchange[torch]"' in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_demo_runs_and_prints_json(tmp_path: Path) -> None:
    words = ("demo", "-n", "2", "--steps", "2", "--keep", tmp_path / "kept", "--json")
    command, environ = warm_program("-m", "statexchange", *words)
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
    assert done.returncode == 0, done.stderr
    validator("demo.json").validate(json.loads(done.stdout))
    data = json.loads(done.stdout)["data"]
    assert data["tensors_equal"] == data["tensors_total"] > 0
    assert data["path"] == os.fspath(tmp_path / "kept" / "merged")
    assert Path(data["picture"]).read_text().startswith("<svg ")
    assert "step 1/2  loss " in done.stderr


def fake_report(path: str | None, mismatches: tuple[str, ...]) -> demo.DemoReport:
    return demo.DemoReport(
        first_world_size=4,
        first_mesh=(2, 2),
        first_losses=tuple(5.6 - 0.04 * step for step in range(50)),
        resumed_step=40,
        world_size=2,
        mesh=(1, 2),
        parameters=86,
        losses=tuple(5.6 - 0.04 * step for step in range(80)),
        step_seconds=(0.25,) * 40,
        tensors_total=3,
        mismatches=mismatches,
        logits_error=3e-7,
        prompt="The ",
        text="import\nstatement",
        files=(("model.safetensors", 4000),),
        model_bytes=280,
        shard_bytes=(70,) * 4,
        rank_bytes=(70,) * 4,
        export_bytes=280,
        export_seconds=0.5,
        root_peak_bytes=300_000_000,
        root_peak_growth_bytes=1000,
        total_seconds=30.0,
        path=path,
    )


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch, workspace: Path, tmp_path: Path) -> dict[str, tuple[str, ...]]:
    """Replace the demo by one that trains nothing and draws a merged workspace."""
    settings: dict[str, tuple[str, ...]] = {"mismatches": ()}

    def run_demo(_ranks: int, keep: str | None, steps: int, on_progress: "demo.OnProgress") -> demo.DemoReport:
        from statexchange.checkpoint.merge import merge_checkpoint

        target = merge_checkpoint(workspace, os.path.join(keep or tmp_path / "scratch", "merged")).path
        for step in range(steps):
            on_progress({"phase": "train", "step": step, "loss": 5.6, "seconds": 0.25})
            if step == steps // 2:
                on_progress({"phase": "killed", "step": step + 1, "ranks": 4})
                on_progress({"phase": "resumed", "step": step, "ranks": 2})
        on_progress({"phase": "export"})
        on_progress({"phase": "load", "path": target})
        return fake_report(target if keep else None, settings["mismatches"])

    monkeypatch.setattr(demo, "run_demo", run_demo)
    return settings


@pytest.mark.usefixtures("faked")
def test_demo_prints_its_steps_and_results(call: CommandLine, tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    code, out, err = call("demo", "--keep", keep, "--steps", "25")
    assert code == 0
    steps = [line for line in err.splitlines() if line.startswith("step")]
    assert [line.split()[1] for line in steps] == ["1/25", "10/25", "20/25", "25/25"]
    for text in (
        "trained on 4 ranks (2 data parallel x 2 tensor parallel),",
        "killed, and resumed on 2 ranks (1 data parallel x 2 tensor parallel)",
        "loss on 4 ranks, killed after step 50 of 80: 5.60 to 3.64",
        "loss on 2 ranks, resumed from the save of step 40: 4.00 to 2.44, steps of 0.25 s",
        "3/3",
        "3.0e-07",
        "560 B/s",
        "300 MB",
        "30 s",
        "rank 3",
    ):
        assert text in out, text
    assert "killed all 4 ranks after step 13" in err
    assert "resumed from the save of step 12 on 2 ranks" in err
    assert "'The import\\nstatement'" in out
    assert f"files in {keep}/merged" in out
    assert out.endswith(f"picture  {keep}/supply.svg\n")
    assert (keep / "supply.svg").stat().st_mode & 0o077 == 0o044
    assert max(map(len, out.splitlines())) <= 110
    code, _, err = call("demo", "--keep", keep)
    assert code == 7
    assert "supply.svg" in err


@pytest.mark.usefixtures("faked")
def test_demo_on_a_terminal_is_one_live_line(call: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, _, err = call("demo", "--steps", "25")
    assert err.count("\n") == 1  # that it has resumed stays on the terminal
    assert "step  7/25  loss 5.600  0.25 s/step  4.5 s left" in err
    assert err.endswith("\r\x1b[K")


def test_demo_reports_a_difference(call: CommandLine, faked: dict[str, tuple[str, ...]]) -> None:
    faked["mismatches"] = ("norm.weight",)
    code, out, _ = call("demo", "--steps", "1")
    assert code == 1
    assert "2/3" in out
    assert "norm.weight" in out
    assert "not kept" in out


def test_every_command_has_a_help_text_and_takes_format_and_json() -> None:
    context = cli.make_context("statexchange", ["info", "x"], obj=Output())
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        assert {"--format", "--json"} <= {option for parameter in command.params for option in parameter.opts}
        assert command.help


def test_a_dry_run_raises_the_errors_of_the_merge(call: CommandLine, workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for options in ([], ["--dry-run"]):
        assert call("merge", workspace, tmp_path / "out", *options)[0] == 7
        assert call("merge", workspace, tmp_path / "new", "--exclude", "*", *options)[0] == 2
    assert not (tmp_path / "new").exists()


def test_a_dry_run_prints_where_tensors_come_from(call: CommandLine, workspace: Path, tmp_path: Path) -> None:
    code, text, err = call(
        "merge", workspace, tmp_path / "out", "--dry-run", "--rename", r"\.weight$=.w", "--dtype", "float16"
    )
    assert (code, err) == (0, "")
    table = [line.split("\t") for line in text.splitlines() if "\t" in line]
    assert table[0] == ["NAME", "DTYPE", "SHAPE", "FILE", "FROM"]
    rows = {row[0]: row[1:] for row in table[1:]}
    assert rows["rows.w"][2:] == ["model.safetensors", "ranks 0-3, as rows.weight"]
    data = call.json("merge", workspace, tmp_path / "out", "--dry-run")[1]["data"]
    assert {t["name"]: t["ranks"] for t in data["tensors"]}["rows.weight"] == [0, 1, 2, 3]
    assert "tensors" not in call.json("merge", workspace, tmp_path / "out")[1]["data"]


def test_merge_takes_a_dtype_for_all_and_others_by_pattern(call: CommandLine, workspace: Path, tmp_path: Path) -> None:
    dtypes = ["--dtype", "bf16", "--dtype", "rows.*=float64"]
    data = call.json("merge", workspace, tmp_path / "out", "--dry-run", *dtypes)[1]["data"]
    found = {tensor["name"]: tensor["dtype"] for tensor in data["tensors"]}
    assert (found.pop("rows.weight"), set(found.values())) == ("F64", {"BF16"})
    code, _, err = call("merge", workspace, tmp_path / "out", "--dtype", "bf16", "--dtype", "float16")
    assert (code, "bf16 and float16 are both for all tensors" in err) == (2, True)
    assert call("merge", workspace, tmp_path / "out", "--dtype", "bf17")[0] == 2


def test_merge_reports_changed_names(call: CommandLine, workspace: Path, tmp_path: Path) -> None:
    assert call("merge", workspace, tmp_path / "one", "--rename", "^=module.")[0] == 0
    code, _, err = call("merge", tmp_path / "one", tmp_path / "two")
    assert (code, "wrappers" in err) == (0, True)
    assert call("merge", workspace, tmp_path / "three", "--rename", "^=model.model.")[0] == 0
    envelope = call.json("merge", tmp_path / "three", tmp_path / "four")[1]
    assert '--rename "^model\\.="' in envelope["warnings"][0]


def test_the_layout_in_the_help_of_merge_is_valid(call: CommandLine) -> None:
    from statexchange.sharding.rules import Layout

    text = call("merge", "--help")[1]
    lines = text[text.index('  {"mesh"') : text.index("Without a mesh")].replace("the ranks, slowest axis first", "")
    assert len(Layout.parse(json.loads(lines)).rules) == 5


def test_a_host_in_a_file_url_and_numbers_without_a_conversion_are_refused(call: CommandLine, tmp_path: Path) -> None:
    assert "write file:///absolute/path, or the path alone" in call("info", "file://x")[2]
    save_file({"w": np.ones(2)}, tmp_path / "model.safetensors")
    code, _, err = call("merge", tmp_path, tmp_path / "out", "--convert-with", "n_heads=2")
    assert (code, "give convert, too" in err) == (EXIT_CODES["USAGE"], True)


def test_missing_credentials_are_named(call: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    code, _, err = call("info", "s3://bucket/x")
    assert (code, "Unable to locate credentials; give them by the environment" in err) == (EXIT_CODES["IO"], True)
