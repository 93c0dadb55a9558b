"""Progress, the demo, and what a merge reports of names, dtypes and places."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import CommandLine, command_environment
from json_schemas import validator
from safetensors.numpy import save_file
from scripts import warm_program

from statexchange import demo
from statexchange.cli import progress as progress_module
from statexchange.cli.commands import COMMANDS
from statexchange.cli.main import cli
from statexchange.cli.output import EXIT_CODES, Output, most_severe
from statexchange.cli.progress import Progress
from statexchange.errors import CorruptError, IncompleteError, ReplicaError, StorageError
from statexchange.units import format_ranks, format_seconds

pytestmark = pytest.mark.usefixtures("plain_environment")


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


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (["fp32", "*=bf16"], "fp32 and bf16 are both for all tensors"),
        (["a.*=fp32", "a.*=bf16"], "fp32 and bf16 are both for a.*"),
    ],
    ids=["all", "a pattern"],
)
def test_two_dtypes_for_the_same_tensors_are_refused(
    call: CommandLine, dtypes: list[str], message: str, tmp_path: Path
) -> None:
    options = [option for dtype in dtypes for option in ("--dtype", dtype)]
    code, _, err = call("merge", tmp_path, tmp_path / "out", *options)
    assert (code, message in err) == (2, True)
