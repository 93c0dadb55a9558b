"""The command line on broken sources and bad arguments: the exit code, and what is named."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_lines import ON_A_PATH, words_of
from command_runs import held, shell
from commands import CommandLine
from stored import contents_of, flip_bit
from workspaces import write_round

import statexchange
from statexchange.cli.commands import COMMANDS
from statexchange.cli.output import EXIT_CODES
from statexchange.errors import ReplicaError

pytestmark = pytest.mark.usefixtures("plain_environment")


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
    for command in ON_A_PATH:
        code, _, err = call(*words_of(command, tmp_path, tmp_path / "out"))
        assert code == 3
        assert os.fspath(tmp_path) in err
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
