"""The command line: what is imported, and what `info`, `ls`, `verify` and `merge` print of whole checkpoints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_runs import shell
from commands import CommandLine, command_environment
from safetensors.numpy import load_file, save_file
from stored import write_raw
from warm_python import warm_python

from statexchange.cli.commands import COMMANDS
from statexchange.units import printable

pytestmark = pytest.mark.usefixtures("plain_environment")


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


def test_a_merge_of_whole_runs_imports_no_numpy(tmp_path: Path) -> None:
    """It would take half the time of a small merge."""
    for number in (1, 2):
        tensors = {f"w{number}": np.full((4, 3), number, np.float32)}
        save_file(tensors, tmp_path / f"model-0000{number}-of-00002.safetensors")
    weight_map = {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    program = (
        "import sys\nfrom statexchange.cli.main import main\n"
        f"try: main(['merge', {os.fspath(tmp_path)!r}, {os.fspath(tmp_path / 'merged')!r}])\n"
        "except SystemExit as ended: assert not ended.code\n"
        "print(*{'torch', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=command_environment(), timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "\n")
    assert np.array_equal(load_file(tmp_path / "merged" / "model.safetensors")["w2"], np.full((4, 3), 2, np.float32))


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
