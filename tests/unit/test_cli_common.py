"""Behaviour that all commands share: several PATHs, quiet and verbose, patterns, trees, help."""

import contextlib
import json
import logging
import math
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from archives import unpack
from command_lines import ON_A_PATH, ON_SEVERAL_PATHS, SHARED, words_of
from commands import CommandLine, command_environment
from stored import DATA, write_raw
from warm_python import warm_python

import statexchange as sx
from statexchange.cli.commands import COMMANDS
from statexchange.cli.output import Output
from statexchange.errors import did_you_mean

pytestmark = pytest.mark.usefixtures("plain_environment")


# Several PATHs


@pytest.mark.parametrize("command", ON_SEVERAL_PATHS)
def test_several_paths_have_a_heading_each(call: CommandLine, made: Path, command: str) -> None:
    paths = [made / "whole", made / "other"]
    alone = [call(command, path) for path in paths]
    code, out, _ = call(command, *paths)
    assert code == 0
    first, second, *total = out.split("\n\n")
    assert first.splitlines()[0] == f"==> {paths[0]} <=="
    assert second.splitlines()[0] == f"==> {paths[1]} <=="
    assert total == (["2 of 2 without a finding\n"] if command == "verify" else [])
    if command != "verify":  # which prints its duration
        assert [part.split("\n", 1)[1].rstrip("\n") for part in (first, second)] == [
            out.rstrip("\n") for _, out, _ in alone
        ]


@pytest.mark.parametrize("command", ON_SEVERAL_PATHS)
def test_a_failure_at_one_path_does_not_stop_the_others(call: CommandLine, made: Path, command: str) -> None:
    paths = [made / "absent", made / "whole"]
    code, out, err = call(command, *paths)
    assert code == 3
    assert err == f"error: no such path [{paths[0]}]\n"
    assert out.startswith(f"==> {paths[0]} <==\n\n==> {paths[1]} <==\n")
    code, _, err = call(command, "\x1b[31mevil", made / "whole")
    assert (code, "\x1b" in err) == (3, False)


def test_the_exit_code_of_several_paths_is_that_of_the_most_severe(call: CommandLine, made: Path) -> None:
    code, out, _ = call("verify", made / "absent", made / "flipped", made / "whole")
    assert code == 4
    assert "CORRUPT" in out
    assert out.rstrip().endswith(
        "every digest agrees\n\n1 of 3 without a finding\n"
        + "".join(
            f"{code:<10}  {made / name}\n" for code, name in (("NOT_FOUND", "absent"), ("CORRUPT", "flipped"))
        ).rstrip()
    )


@pytest.mark.parametrize("command", ON_A_PATH)
def test_a_directory_of_checkpoints_is_not_found_and_the_error_names_scan(
    call: CommandLine, made: Path, tmp_path: Path, command: str
) -> None:
    code, _, err = call(*words_of(command, made, tmp_path / "out"))
    assert (code, "statexchange scan lists them" in err, err.count("\n")) == (3, True, 1)
    assert "statexchange ls the versions of weights" in err


@pytest.mark.parametrize("command", ON_SEVERAL_PATHS)
def test_several_paths_as_json_are_a_list_of_records(call: CommandLine, made: Path, command: str) -> None:
    paths = [made / "whole", made / "absent", made / "other"]
    code, envelope = call.json(command, *paths, stderr="")
    assert (code, envelope["schema"], envelope["ok"], envelope["code"]) == (3, 1, False, "NOT_FOUND")
    records = envelope["data"]
    assert [(record["path"], record["code"], record["ok"]) for record in records] == [
        (str(paths[0]), "OK", True),
        (str(paths[1]), "NOT_FOUND", False),
        (str(paths[2]), "OK", True),
    ]
    for path, record in zip(paths, records, strict=True):
        alone = call.json(command, path, stderr="")[1]
        assert record == {"path": str(path), **{key: value for key, value in alone.items() if key != "schema"}}


def test_several_paths_as_json_lines_are_an_object_each(call: CommandLine, made: Path) -> None:
    paths = [made / "whole", made / "absent"]
    code, out, _ = call("ls", *paths, "--format", "jsonl")
    *records, summary = map(json.loads, out.splitlines())
    assert code == 3
    assert [(record["type"], record["path"], record["code"]) for record in records] == [
        ("path", str(paths[0]), "OK"),
        ("path", str(paths[1]), "NOT_FOUND"),
    ]
    assert len(records[0]["data"]["tensors"]) == 7
    assert (summary["type"], summary["code"], summary["data"]) == (
        "summary",
        "NOT_FOUND",
        {"num_paths": 2, "num_ok": 1},
    )


def test_data_and_messages_of_several_paths_are_in_order_in_one_file(made: Path) -> None:
    command = [warm_python("commands"), "-m", "statexchange", "info", made / "absent", made / "whole"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=command_environment(), timeout=60
    )
    heading, error, _, other, *_ = done.stdout.splitlines()
    assert (heading, error) == (f"==> {made}/absent <==", f"error: no such path [{made}/absent]")
    assert other == f"==> {made}/whole <=="


@pytest.mark.parametrize("command", SHARED, ids=lambda command: command[0])
def test_quiet_writes_no_messages_but_the_same_data_and_exit_code(
    call: CommandLine, made: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    code, out, _ = call(*command)
    for arguments in ([*command, "-q"], [*command, "--quiet"], ["-q", *command]):
        quiet_code, quiet_out, quiet_err = call(*arguments)
        assert (quiet_code, quiet_err) == (code, "")
        assert len(quiet_out.splitlines()) == len(out.splitlines())


def test_quiet_keeps_errors_with_their_hints_and_warnings_in_json(
    call: CommandLine, made: Path, tmp_path: Path
) -> None:
    code, out, err = call("info", "-q", made / "absent")
    assert (code, out, err) == (3, "", f"error: no such path [{made / 'absent'}]\n")
    code, _, err = call("-q", "merge", made / "flipped", tmp_path / "out")
    assert (code, err.splitlines()[-1]) == (4, "hint: statexchange verify lists all problems")
    bare = tmp_path / "bare.safetensors"
    bare.write_bytes((made / "whole" / "model.safetensors").read_bytes())
    assert "no digest is known" in call("verify", bare)[2]
    assert call("verify", bare, "-q")[2] == ""
    assert "no digest is known" in call.json("verify", bare, "-q", stderr="")[1]["warnings"][0]


@pytest.mark.parametrize("command", SHARED, ids=lambda command: command[0])
def test_verbose_logs_with_times_on_stderr(
    call: CommandLine, made: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    code, out, err = call(*command)
    for arguments in ([*command, "-v"], ["--verbose", *command]):
        verbose_code, verbose_out, verbose_err = call(*arguments)
        logged = [line for line in verbose_err.splitlines() if " DEBUG statexchange." in line]
        assert any(".safetensors" in line for line in logged)
        assert all(re.match(r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ", line) for line in logged)
        assert (verbose_code, len(verbose_out.splitlines())) == (code, len(out.splitlines()))
        assert " DEBUG " not in verbose_out
    assert call(*command)[2] == err, "the log ends with the command"


def test_quiet_and_verbose_contradict_each_other(call: CommandLine, made: Path) -> None:
    for arguments in (["info", "-q", "-v", made], ["-q", "info", "-v", made]):
        code, _, err = call(*arguments)
        assert (code, err.splitlines()[0]) == (2, "error: --quiet and --verbose contradict each other")


def test_options_of_all_commands_may_stand_before_the_command(call: CommandLine, made: Path) -> None:
    assert call("--json", "info", made / "whole") == call("info", made / "whole", "--json")


def test_a_logged_warning_is_a_warning_of_the_command(
    call: CommandLine, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from statexchange.report import summary

    def warned(path: str, *, tree_depth: int | None) -> summary.Summary:
        logging.getLogger("statexchange.storage").warning("late \x1b[31m files")
        return summarize(path, tree_depth=tree_depth)

    summarize = summary.summarize
    monkeypatch.setattr(summary, "summarize", warned)
    assert call("info", made / "whole")[2] == "warning: late \\x1b[31m files\n"
    assert call("info", made / "whole", "-q")[2] == ""
    assert call.json("info", made / "whole", stderr="")[1]["warnings"] == ["late \x1b[31m files"]


# Close names are suggested


@pytest.mark.parametrize(("typed", "meant"), [("inf", "info"), ("list", "ls"), ("verfy", "verify"), ("mrege", "merge")])
def test_a_mistyped_command_is_a_usage_error_that_suggests_the_closest(
    call: CommandLine, typed: str, meant: str
) -> None:
    code, out, err = call(typed, "x")
    assert (code, out) == (2, "")
    assert err == f"error: No such command {typed!r}: did you mean {meant!r}?\nhint: statexchange --help\n"
    assert call("xyzzy")[2].startswith("error: No such command 'xyzzy'\n")


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("layer.0.up.weight", "layers.2.up.weight"),
        ("layers.*.upp.weight", "layers.2.up.weight"),
        ("model.layers.1.down.weight", "layers.2.down.weight"),
        ("*.wieght", ".weight"),
        ("nrom*", "norm.weight"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_that_suggests_close_names(
    call: CommandLine, made: Path, tmp_path: Path, pattern: str, meant: str
) -> None:
    whole = made / "whole"
    for command in (["ls", whole], ["merge", whole, tmp_path / "out"], ["diff", whole, made / "other"]):
        code, out, err = call(*command, "--include", pattern)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: include pattern {pattern!r} matches no tensor: did you mean '")
        assert meant in err


def test_exclude_and_rename_patterns_that_match_nothing_are_warnings(
    call: CommandLine, made: Path, tmp_path: Path
) -> None:
    patterns = ["--exclude", "norms.*", "--rename", r"^layer\.=model.layers."]
    for command in (["merge", made / "whole", tmp_path / "out", "--dry-run"], ["diff", made / "whole", made / "other"]):
        err = call(*command, *patterns)[2]
        assert "exclude pattern 'norms.*' matches no tensor: did you mean 'norm.weight'" in err
        assert r"rename pattern '^layer\\.' matches no tensor: did you mean 'layers." in err
    fitting = ["--exclude", "norm.*", "--rename", r"^layers\.=a.", "--rename", r"^a\.=b."]
    assert "matches no tensor" not in call("merge", made / "whole", tmp_path / "out", "--dry-run", *fitting)[2]


def test_the_closest_of_many_and_of_long_names_are_found() -> None:
    names = [f"model.layers.{n}.{'x' * 500}.{n % 7}.{chr(97 + n % 26)}" for n in range(10_000)]
    assert "did you mean" in did_you_mean("model.layer.0." + "x" * 500 + ".0.a", names)
    assert did_you_mean("", names) == did_you_mean("*", names) == did_you_mean("a", []) == ""


@pytest.mark.parametrize("dtype", ["BF16", "bf16", "bfloat16", "torch.bfloat16", "BFloat16"])
def test_a_dtype_is_accepted_under_each_of_its_names(call: CommandLine, made: Path, tmp_path: Path, dtype: str) -> None:
    for text in (dtype, f"layers.*={dtype}"):
        code, envelope = call.json("merge", made / "whole", tmp_path / "out", "--dry-run", "--dtype", text, stderr="")
        dtypes = {tensor["name"]: tensor["dtype"] for tensor in envelope["data"]["tensors"]}
        assert (code, dtypes["layers.0.up.weight"]) == (0, "BF16")
    report = sx.merge_checkpoint(made / "whole", tmp_path / "api", dtype=dtype)
    assert sx.open_checkpoint(report.path)["norm.weight"].dtype == "BF16"


# The tree of modules


def write_model(path: Path, dtypes: dict[int, str]) -> None:
    """Write a safetensors file of a model with 12 layers, those of `dtypes` in another dtype."""
    shapes = {"embed.weight": [8, 4], "norm.weight": [4]}
    for layer in range(12):
        shapes |= {f"layers.{layer}.attn.q.weight": [4, 4], f"layers.{layer}.mlp.up.weight": [16, 4]}
    tensors = {}
    for name, shape in shapes.items():
        dtype = dtypes.get(int(name.split(".")[1]) if "layers" in name else -1, "BF16")
        tensors[f"model.{name}"] = (dtype, shape, bytes(math.prod(shape) * {"BF16": 2, "F32": 4}[dtype]))
    write_raw(path, tensors)


def test_the_tree_joins_numbered_modules_that_are_alike(call: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_model(path, {9: "F32"})
    data = call.json("info", path, "--tree", "--depth", "3", stderr="")[1]["data"]
    top = data["tree"]
    assert (top["num_tensors"], top["num_parameters"], top["nbytes"]) == (
        data["num_tensors"],
        data["num_parameters"],
        data["nbytes"],
    )
    (model,) = top["children"]
    embed, _, layers = model["children"]
    assert (embed["name"], embed["nbytes"], layers["path"]) == ("embed", 64, "model.layers")
    found = [(node["name"], node["num_alike"], node["num_tensors"], node["nbytes"]) for node in layers["children"]]
    assert found == [("0..8", 9, 18, 9 * 160), ("9", 1, 2, 320), ("10..11", 2, 4, 320)]
    assert sum(node["nbytes"] for node in layers["children"]) == layers["nbytes"]
    assert all(node["children"] == [] for node in layers["children"])
    assert call.json("info", path, stderr="")[1]["data"]["tree"] is None


def test_the_tree_on_a_terminal_is_indented_and_fits_its_width(
    call: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.safetensors"
    write_model(path, {})
    for width in (80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        _, out, _ = call("info", path, "--tree", "--format", "human")
        header, *rows = out.split("\n\n")[1].splitlines()
        assert header.split() == ["MODULE", "PARAMETERS", "BYTES", "SHARE"]
        assert any(row.startswith("    0..11 (12 alike)  ") for row in rows)
        assert max(map(len, rows)) <= width
        assert rows[0].count("█") == 20
    monkeypatch.setattr(Output, "bar", lambda _self, length: "#" * length)
    assert call("info", path, "--tree", "--format", "human")[1].isascii()


def test_the_tree_in_a_pipe_has_whole_names_and_exact_numbers(call: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_model(path, {})
    _, out, _ = call("info", path, "--depth", "3")
    assert "model.layers.0..11\t960\t1920" in out.splitlines()
    assert "█" not in out


def test_the_tree_escapes_hostile_names_and_limits_its_depth(call: CommandLine, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    names = [".".join(["a"] * 200), "a..b", ".", "99999999999999999999.w", "01.w", "1.w", "2.\u202e", "x" * 500]
    write_raw(path, {name: ("U8", [0], b"") for name in names})
    code, out, _ = call("info", path, "--depth", "64", "--format", "human")
    assert (code, "\u202e" in out, "\\u202e" in out) == (0, False, True)
    assert call.json("info", path, "--depth", "64", stderr="")[1]["data"]["tree"]["num_tensors"] == len(names)
    assert call("info", path, "--depth", "65")[0] == 2


# The mapping of any source


def whole_sources(root: Path) -> list[Path]:
    """Return each path below a copy of the test data that is opened as one checkpoint, with its archives unpacked.

    A copy, as workspaces in which others may write are refused, and git gives directories the modes of the umask. Those
    of version 0.2 have tests of their own; in some of them each rank has tensors of its own.
    """
    found = []
    shutil.copytree(DATA, root / "data", ignore=shutil.ignore_patterns("version-0.2"))
    for path in root.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    for archive in sorted(DATA.rglob("*.tar.xz")):
        target = root / archive.name.removesuffix(".tar.xz")
        unpack(archive, target)
    for path in sorted(path for path in root.rglob("*") if path.is_dir() or path.suffix == ".safetensors"):
        with contextlib.suppress(sx.StateExchangeError):
            sx.open_checkpoint(path).close()
            found.append(path)
    return found


def test_a_checkpoint_of_any_kind_is_read(tmp_path: Path) -> None:
    num_sources = 0
    for path in whole_sources(tmp_path):
        num_sources += 1
        with sx.open_checkpoint(path) as checkpoint:
            assert len(checkpoint) == len([*checkpoint]) > 0
            name, tensor = next(iter(checkpoint.items()))
            assert tuple(tensor.read().shape) == tuple(tensor.read(framework="pt").shape) == tensor.shape, name
    assert num_sources >= 7


# Help


def test_the_first_sentence_of_each_command_fits_in_the_help(
    call: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = call("--help")[1].partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in listed] == list(COMMANDS)
    assert [line for line in listed if not line.endswith(".") or line.endswith("...")] == []


def examples(call: CommandLine, command: str) -> list[str]:
    lines = call(command, "--help")[1].partition("Examples:\n")[2].partition("\n\n")[0].splitlines()
    return [line.strip().removeprefix("statexchange ") for line in lines]


def test_the_examples_in_the_help_run(call: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {"layers.0.weight": np.ones((4, 3), np.float32), "norm.weight": np.ones(3, np.float32)}
    sx.export_checkpoint(state, "model")
    sx.export_checkpoint({**state, "norm.weight": np.full(3, 2.0, np.float32)}, "trained")
    sx.save_checkpoint(state, "shards")
    saves = sx.Checkpoints("saves", keep=None)
    for step in (1, 2, 3):
        saves.save(state, step)
    Path("bare").mkdir()
    Path("bare/model.safetensors").write_bytes(Path("model/model.safetensors").read_bytes())
    for command in COMMANDS:
        found = examples(call, command)
        assert found, command
        for line in found if command != "demo" else []:  # test_demo_runs_and_prints_json runs the demo
            code, _, err = call(*shlex.split(line))
            assert code == (1 if command == "diff" else 0), (line, err)


# Completion


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_lists_commands_and_options(shell: str) -> None:
    run = [warm_python("commands"), "-c", "from statexchange.__main__ import main; main()"]
    for words, expected in (("statexchange ", COMMANDS), ("statexchange info --tr", ["--tree"])):
        # fish gives the word that is being typed in COMP_CWORD, the others its number.
        typed = words.split(" ")[-1] if shell == "fish" else str(len(words.split(" ")) - 1)
        more = {"_STATEXCHANGE_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": typed}
        done = subprocess.run(run, capture_output=True, text=True, env=command_environment(**more), timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert all(any(name in line for line in done.stdout.splitlines()) for name in expected), done.stdout
