"""The pytest plugin: marked tests run on ranks, and are reported as pytest does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from launched_ranks import all_reduce_mpi, reduce_on_threads, wait_until
from sweeps import slow

pytest_plugins = "pytester"


# The plugin


@pytest.mark.ranks(2, slow(3), backend=("processes", slow("gloo")))
@pytest.mark.parametrize("shape", [(2, 3), None])
def test_marked_tests_run_on_ranks(tmp_path: Path, shape: tuple[int, int] | None) -> None:
    assert shape in ((2, 3), None)
    assert isinstance(tmp_path, Path)
    (tmp_path / os.environ["RANK"]).touch()
    assert wait_until(lambda: len(list(tmp_path.iterdir())) == int(os.environ["WORLD_SIZE"]))


@pytest.mark.ranks(2)
def test_marked_tests_run_on_threads(tmp_path: Path) -> None:
    assert reduce_on_threads() == [0, 1]


@pytest.mark.ranks(2, backend="mpi")
def test_marked_tests_run_under_mpi() -> None:
    assert all_reduce_mpi() == 3


MARKED = """
    import time, pytest

    @pytest.mark.ranks(2, backend="processes")
    def test_fails():
        assert [1, 2] == [1, 3]

    @pytest.mark.ranks(2, backend="processes", timeout_s=1)
    def test_hangs():
        time.sleep(60)

    @pytest.mark.ranks(1, backend="processes")
    def test_skips():
        pytest.skip("no reason")

    def test_skips_for_a_good_reason():
        pytest.skip("no GPU here")
"""


@pytest.fixture
def pytester_without_plugins(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return pytester


def test_the_plugin_reports_as_pytest_does(pytester_without_plugins: pytest.Pytester) -> None:
    pytester_without_plugins.makepyfile(test_marked=MARKED)
    found = pytester_without_plugins.runpytest("-rs", "-p", "statexchange.testing.plugin", "--no-skips")
    found.assert_outcomes(failed=2, skipped=2)
    text = found.stdout.str()
    assert "assert [1, 2] == [1, 3]" in text
    assert "2 of 2 ranks failed on processes" in text
    assert "rank 1: running: did not finish within 1 s, still running in test_hangs" in text
    assert "--no-skips: test_marked.py::test_skips[processes-1]: no reason" in text
    assert "no-skips: test_marked.py::test_skips_for" not in text


def test_a_skip_fails_the_session_only_where_none_is_allowed(pytester_without_plugins: pytest.Pytester) -> None:
    pytester_without_plugins.makepyfile("import pytest\ndef test_it(): pytest.skip('just so')\n")
    assert pytester_without_plugins.runpytest("-p", "statexchange.testing.plugin").ret == 0
    assert pytester_without_plugins.runpytest("-p", "statexchange.testing.plugin", "--no-skips").ret == 1


def test_skips_of_xdists_workers_count(pytester_without_plugins: pytest.Pytester) -> None:
    pytester_without_plugins.makepyfile(
        "import pytest\ndef test_it(): pytest.skip('just so')\ndef test_gpu(): pytest.skip('no GPU')\n"
    )
    found = pytester_without_plugins.runpytest_subprocess(
        "-p", "xdist", "-n", "2", "-p", "statexchange.testing.plugin", "--no-skips"
    )
    assert found.ret == 1
    found.assert_outcomes(skipped=2)
    text = found.stdout.str()
    assert "--no-skips: test_skips_of_xdists_workers_count.py::test_it: just so" in text
    assert "::test_gpu: no GPU" not in text


def test_a_world_size_and_a_backend_may_have_marks(pytester_without_plugins: pytest.Pytester) -> None:
    pytester_without_plugins.makepyfile(
        """
        import pytest

        def more(value):
            return pytest.param(value, marks=pytest.mark.more)

        @pytest.mark.ranks(2, more(3), backend=("threads", more("gloo")))
        def test_it(): pass
        """
    )
    found = pytester_without_plugins.runpytest(
        "-p", "statexchange.testing.plugin", "-v", "-m", "not more", "-W", "ignore"
    )
    found.assert_outcomes(passed=1, deselected=3)
    assert "test_it[threads-2]" in found.stdout.str()


def test_a_marker_without_world_sizes_is_refused(pytester_without_plugins: pytest.Pytester) -> None:
    pytester_without_plugins.makepyfile("import pytest\n@pytest.mark.ranks(backend='gloo')\ndef test_it(): pass\n")
    found = pytester_without_plugins.runpytest("-p", "statexchange.testing.plugin")
    assert "use ranks(*world_sizes" in found.stdout.str()
