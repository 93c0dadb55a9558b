"""Blocks of README.md and docs that need ranks or long runs, and the table of the four systems' names.

`test_pages.py` runs all other blocks, and has the list of those that are run here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import (
    ALONE,
    BIN,
    HOME,
    page_block,
    page_text,
    run_commands,
    run_script,
    warm_command,
    warm_program,
    with_mpiexec,
    with_torchrun,
)
from sweeps import slow

import statexchange as sx

NAMES_BY_SYSTEM = {
    "ModelOpt": """
        NFSWorkspace NFSWorkspace.is_initialized NFSWorkspace.write_configs_and_weights
        NFSWorkspace.read_configs_and_weights_from_rank get_configs_parallel get_tensors_parallel
    """,
    "Lux": """
        MPIBackend NCCLBackend initialize initialized get_distributed_backend local_rank total_workers
        allreduce! bcast! reduce! avg synchronize!! DistributedOptimizer DistributedDataContainer
    """,
    "Bagua": """
        DistributedModule DistributedModule.unwrap DistributedModule.forward Reducer Reducer.fill_slot
        Reducer.initialize_buckets Reducer.register_bagua_buckets Reducer.add_param Reducer.mark_bucket_ready
        Reducer.mark_tensor_ready Reducer.mark_on_complete OverlappingWrapper OverlappingWrapper.reset_reducer
        OverlappingWrapper.create_hooks OverlappingWrapper.forward ModelSwitchWrapper
        ModelSwitchWrapper.switch_to ModelSwitchWrapper.state_dict ModelSwitchWrapper.report_metrics
        ModelSwitchWrapper.ask_and_update_hyperparameters ModelSwitchWrapper.forward broadcast_parameters
        allreduce_parameters bagua_init
    """,
    "Flashlight": """
        distributedInit isDistributedInit distributedBackend getWorldRank getWorldSize allReduce
        allReduceMultiple syncDistributed barrier Reducer Reducer.add Reducer.finalize InlineReducer
        CoalescingReducer
    """,
}


@pytest.fixture(scope="module", params=[True, slow(False)], ids=["warm", "new interpreters"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, bool]:
    """Run the script of the README as its text shows: on two ranks, which are killed, then on three.

    Returns the folder, the output of the three ranks, and whether the processes were forked.
    """
    is_warm: bool = request.param
    folder = tmp_path_factory.mktemp("readme")
    assert page_block("commands: killed").splitlines() == [
        "$ KILL_AT=25 torchrun --nproc-per-node 2 train.py",
        "$ torchrun --nproc-per-node 3 train.py",
    ]
    text = page_block("block: train.py")
    (folder / "train.py").write_text(text)
    words, environ = ([BIN / "torchrun", *with_torchrun(2)[1:]], dict(os.environ))
    if is_warm:
        words, environ = warm_command(with_torchrun(2), text)
    environ["KILL_AT"] = "25"
    command = [*words, "train.py"]
    killed = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=100)
    assert killed.returncode != 0
    assert "exitcode  : -9" in killed.stderr
    assert sx.Checkpoints(folder / "saves").steps() == [10, 20]
    return folder, run_script(with_torchrun(3), "train.py", text, folder, is_warm=is_warm).stdout, is_warm


def test_the_script_prints_what_the_readme_shows(trained: tuple[Path, str, bool]) -> None:
    lines = page_block("output: torchrun").splitlines()
    assert [trained[1].count(line) for line in lines] == [3] * len(lines)  # ranks may write into each other's lines
    assert len(trained[1].replace("\n", "")) == 3 * sum(map(len, lines))


def test_the_commands_run_on_what_the_script_left(trained: tuple[Path, str, bool]) -> None:
    run_commands(page_block("commands"), trained[0], is_warm=trained[2])


@pytest.mark.slow
def test_the_script_runs_without_a_launcher(tmp_path: Path) -> None:
    done = run_script(ALONE, "train.py", page_block("block: train.py"), tmp_path)
    assert done.stdout.startswith("begins at step 0\nbytes by rank: (2107404,)")


@pytest.mark.slow
def test_the_layout_block_runs_under_mpiexec(tmp_path: Path) -> None:
    run_script(with_mpiexec(2), "layout.py", page_block("block: layout.py"), tmp_path, is_warm=False)
    cut = sx.open_checkpoint(tmp_path / "cut")
    assert cut["up.weight"].read().tolist() == [[0.0] * 4] * 3 + [[1.0] * 4] * 4


@pytest.mark.parametrize("launcher", [slow(with_torchrun(2)), with_mpiexec(2)], ids=["torchrun", "mpiexec"])
def test_the_collectives_print_what_their_page_shows(launcher: tuple[str, ...], tmp_path: Path) -> None:
    done = run_script(launcher, "reduce.py", page_block("block: reduce.py"), tmp_path)
    assert done.stdout.replace(f"{tmp_path}/", ".../") == page_block("output: reduce.py")


def test_a_job_without_tensors_prints_what_its_page_shows(tmp_path: Path) -> None:
    done = run_script(with_mpiexec(2), "job.py", page_block("block: job.py"), tmp_path)
    assert done.stdout == page_block("output: job.py")


@pytest.mark.parametrize(("launcher", "ranks"), [slow(with_torchrun(2), 2), slow(ALONE, 1)], ids=["torchrun", "alone"])
def test_the_training_script_reduces_the_loss(launcher: tuple[str, ...], ranks: int, tmp_path: Path) -> None:
    done = run_script(launcher, "fit.py", page_block("block: fit.py"), tmp_path)
    printed_ranks, loss = re.fullmatch(r"(\d) ranks, loss (\d\.\d+)\n", done.stdout).groups()
    assert (int(printed_ranks), float(loss) < 0.2) == (ranks, True)


@pytest.mark.slow
def test_the_tutorials_job_resumes_on_another_number_of_ranks_and_its_save_is_merged(tmp_path: Path) -> None:
    launchers = (with_torchrun(2), ALONE)
    started = "".join(f"$ {' '.join(launcher)} resume.py\n" for launcher in launchers)
    assert page_block("commands: resume") == started
    losses = []
    for number, launcher in enumerate(launchers):
        done = run_script(launcher, "resume.py", page_block("block: resume.py"), tmp_path)
        began, at, loss = re.fullmatch(r"step (\d+), loss at (\d+): (\d\.\d+)\n", done.stdout).groups()
        assert (int(began), int(at)) == (10 * number, 10 * number + 10)
        losses.append(float(loss))
    assert losses[1] < losses[0]
    run_commands(page_block("commands: look"), tmp_path)
    run_commands(page_block("commands: merge"), tmp_path)
    assert run_script(ALONE, "read.py", page_block("block: read.py"), tmp_path).stdout == page_block("output: read.py")


@pytest.mark.parametrize(
    ("example", "launcher", "is_warm"),
    [
        slow("torchrun_fsdp2.py", with_torchrun(4), True),
        slow("mpiexec_tensor_parallel.py", with_mpiexec(4), True),
        slow("alone.py", ALONE, False),
    ],
    ids=["torchrun", "mpiexec", "alone"],
)
def test_the_examples_train_export_and_compare(
    example: str, launcher: tuple[str, ...], is_warm: bool, tmp_path: Path
) -> None:
    script = (HOME / "tools/examples" / example).read_text()
    done = run_script(launcher, example, script, tmp_path, tmp_path / "out", is_warm=is_warm)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses[0] > 5
    assert losses[1] < 1
    equal, total = re.search(r"(\d+) of (\d+) tensors bit-equal", done.stdout).groups()
    assert equal == total
    assert len(sx.open_checkpoint(tmp_path / "out")) == int(total)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_prints_what_its_page_shows(demo: tuple[Path, str]) -> None:
    """Compare its lines, and the figures that do not depend on the machine; this demo is shorter and keeps files."""
    kept, text = demo
    text, _, picture = text.rpartition("\n\n")
    assert picture == f"picture  {kept}/supply.svg\n"
    assert f"\nfiles in {kept}/merged\n" in text
    text = text.replace(f"files in {kept}/merged\n", "files (not kept; --keep DIR does)\n")
    page = page_block("output: statexchange demo")
    shown, printed = (
        [re.match(r"[a-z' ]*", line)[0].strip() for line in lines.splitlines() if line[:1].isalnum()]
        for lines in (page, text)
    )
    assert shown == printed
    assert "loss on 4 ranks, killed after step 60 of 100" in page
    assert "loss on 4 ranks, killed after step 18 of 30" in text
    last = re.search(r"resumed from the save of step 15: \S+ to (\S+), ", text)[1]
    assert float(last) < 2.6
    assert "tensors bit-equal   30/30" in text


def run_bench(bench: str, *arguments: str) -> str:
    """Return what a bench prints; its processes are forked, except for export.py."""
    path = HOME / "tools/bench" / bench
    command, environ = [sys.executable, path], dict(os.environ)
    if bench != "export.py":
        imports = "transformers" if bench in ("load.py", "dcp.py") else "torch"
        command, environ = warm_program(path, kind=imports)
    done = subprocess.run([*command, *arguments], env=environ, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("bench", "arguments"),
    [
        slow("export.py", ["--megabytes", "16", "--rounds", "1"]),
        slow("load.py", ["--megabytes", "16", "--rounds", "1"]),
        slow("saves.py", ["--megabytes", "16", "--rounds", "1"]),
        slow("memory_copy.py", ["--megabytes", "16", "--rounds", "1"]),
        slow("versions.py", ["--megabytes", "16", "--rounds", "1"]),
        slow("gather.py", ["--megabytes", "16", "--rounds", "1"]),
        slow("collectives.py", ["--ranks", "2", "--largest", "1", "--rounds", "1"]),
        slow("training.py", ["--rounds", "1", "--quick"]),
        slow("losses.py", ["--steps", "2"]),
        slow("merge.py", ["--megabytes", "8", "--rounds", "1", "--dirs", "/dev/shm"]),
        slow("scan.py", ["--directories", "20", "--rounds", "1"]),
        slow("startup.py", ["--rounds", "1"]),
        slow("large_sets.py", ["--names", "20000", "--tensors", "20000", "--rounds", "1"]),
        slow("large_jobs.py", ["--ranks", "40", "--tensors", "20", "--whole", "--torch"]),
        slow("diff.py", ["--megabytes", "16", "--rounds", "1", "--dirs", "/dev/shm"]),
        slow("plan.py", ["--quick"]),
        slow("dcp.py", ["--megabytes", "16", "--rounds", "1"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_the_benches_print_the_tables_that_their_page_shows(bench: str, arguments: list[str]) -> None:
    table = [line.split("|") for line in run_bench(bench, *arguments).splitlines() if line.startswith("|")]
    shown = [line.split("|") for line in page_text("docs/benchmarks.md").splitlines() if line.startswith("|")]
    assert table[0] in shown
    for row in table[2:]:
        assert row[1] in {found[1] for found in shown}


def rows_of_migration_page() -> list[tuple[str, str, str]]:
    return re.findall(
        r"^\| (ModelOpt|Lux|Bagua|Flashlight) \| `([^`]+)` \| (.+) \|$", page_text("docs/migration.md"), re.MULTILINE
    )


def test_every_name_of_the_four_systems_is_in_the_table() -> None:
    assert [(system, name) for system, name, _ in rows_of_migration_page()] == [
        (s, name) for s, names in NAMES_BY_SYSTEM.items() for name in names.split()
    ]


def test_names_in_the_table_exist_and_those_marked_open_do_not() -> None:
    for _, name, here in rows_of_migration_page():
        if here == "open":
            assert not hasattr(sx, name), f"{name} exists: the table should say so"
            continue
        path = re.match(r"`sx\.([\w.]+)`", here)
        assert path is not None, here
        found = sx
        for part in path[1].split("."):
            found = getattr(found, part)


@pytest.mark.slow
def test_the_bench_of_small_tensors_prints_a_table() -> None:
    """Its table is not on the page."""
    assert "|" in run_bench("small.py", "--tensors", "20", "--rounds", "1")


def test_the_readme_has_the_commands_that_install_and_try_the_package() -> None:
    pip, pinned = "&& .venv/bin/pip install", "-c tools/constraints.txt"
    demo = f'python3 -m venv .venv {pip} {pinned} ".[torch]" && .venv/bin/statexchange demo'
    tests = f'python3 -m venv --upgrade-deps .venv {pip} --no-compile {pinned} ".[test]" && .venv/bin/pytest'
    assert f"\n\n    {demo}\n    {tests}\n\n" in page_text("README.md")
