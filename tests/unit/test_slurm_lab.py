"""tools/slurm_lab, a Slurm cluster of two hosts from Debian's packages; .ci/run runs its checks."""

from pathlib import Path

from scripts import CANNOT_RUN, run_lab


def test_what_the_machine_lacks_is_named(tmp_path: Path) -> None:
    done = run_lab("slurm_lab", "true", PATH=str(tmp_path))
    assert done.returncode == CANNOT_RUN, done.stderr
    assert "cannot run here" in done.stderr
    for program in ("apt-get", "dpkg"):
        assert f"the program {program}" in done.stderr
