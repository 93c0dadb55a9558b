"""The pytest plugin: ``@pytest.mark.ranks(2, 4, backend="gloo")`` runs a test on every rank of small worlds.

Load it with ``-p statexchange.testing.plugin``. A test gets its rank from its communicator or environment; it
may ask for `tmp_path`, the same directory on all ranks, and for parameters that are JSON values. A backend and a
world size may be a `pytest.param` with marks of its own. With ``reuse=True`` the ranks may serve several tests, see
`run_ranks`.

With ``--no-skips`` a skip fails the session, unless its reason begins with "no GPU", "no cgroup", "no Slurm" or "no
framework": few machines have these.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from _pytest.assertion import install_importhook
from _pytest.mark.structures import ParameterSet

from statexchange.testing import RankFailure, child, run_ranks
from statexchange.testing.worlds import dismiss_kept, mpi_missing

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from _pytest.assertion.rewrite import AssertionRewritingHook

__all__: list[str] = []

_MARKER = "ranks(*world_sizes, backend='threads', timeout_s=20, reuse=False): run the test on every rank of each world"
_ALLOWED_SKIPS = ("no GPU", "no cgroup", "no Slurm", "no framework")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--no-skips``."""
    parser.addoption("--no-skips", action="store_true", help=f"a skip fails the session, unless for {_ALLOWED_SKIPS}")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", _MARKER)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one run of a marked test for each backend and world size."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    if metafunc.cls is not None:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: the ranks marker is for functions, not for methods")
    if not marker.args or marker.kwargs.keys() - {"backend", "timeout_s", "reuse"}:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: use {_MARKER.partition(':')[0]}")
    backends = marker.kwargs.get("backend", "threads")
    if isinstance(backends, str | ParameterSet):  # a ParameterSet is a tuple, too
        backends = (backends,)
    cases = []
    for name, name_marks in map(_with_marks, backends):
        for size, size_marks in map(_with_marks, marker.args):
            cases.append(pytest.param((name, size), marks=[*name_marks, *size_marks], id=f"{name}-{size}"))
    metafunc.fixturenames.append("ranks_case")
    metafunc.parametrize("ranks_case", cases)


def _with_marks(value: Any) -> tuple[Any, Collection[Any]]:
    return (value.values[0], value.marks) if isinstance(value, ParameterSet) else (value, ())


@pytest.fixture(scope="session", autouse=True)
def _ranks_for_several_tests() -> Iterator[None]:
    """End the ranks that are kept for several tests; fail the session if one ends with an error."""
    yield
    dismiss_kept()


# First, so that neither pytest nor another plugin calls the test in this process.
@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a marked test on its ranks instead of in this process."""
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    case: Any = pyfuncitem.callspec.params["ranks_case"]
    backend, world_size = case
    missing = mpi_missing() if backend == "mpi" else None
    if missing is not None:
        pytest.skip(missing)
    # Not all fixtures, as `funcargs` also has those that the test uses without naming them.
    arguments = {}
    for name in pyfuncitem._fixtureinfo.argnames:  # noqa: SLF001
        if name in pyfuncitem.funcargs:
            arguments[name] = pyfuncitem.funcargs[name]
    options = {"timeout_s": marker.kwargs.get("timeout_s", 20.0), "reuse": marker.kwargs.get("reuse", False)}
    test: Callable[..., None] = pyfuncitem.obj
    try:
        if backend == "threads":
            run_ranks(functools.partial(test, **arguments), world_size, **options)
        else:
            run_ranks(_on_rank, world_size, backend=backend, args=_portable(test, arguments), **options)
    except RankFailure as failure:
        _raise_outcome(failure)
    return True


def _portable(test: Callable[..., None], arguments: dict[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the arguments of `_on_rank`: JSON values, with the names of those that are paths."""
    plain = dict(arguments)
    paths = []
    for name, value in arguments.items():
        if isinstance(value, Path):
            plain[name] = str(value)
            paths.append(name)
    return f"{test.__module__}:{test.__qualname__}", plain, paths


def _on_rank(target: str, arguments: dict[str, Any], paths: list[str]) -> None:
    """Call the test in a rank's process, with pytest's assertion rewriting."""
    _rewriting().mark_rewrite(target.partition(":")[0])  # before the import of its module
    for name in paths:
        arguments[name] = Path(arguments[name])
    child.load(target)(**arguments)


@functools.cache
def _rewriting() -> AssertionRewritingHook:
    """Return pytest's import hook, made without pytest's own plugins: each rank would take 15 ms to load these."""
    return install_importhook(pytest.Config(pytest.PytestPluginManager()))


def _raise_outcome(failure: RankFailure) -> NoReturn:
    bad = [outcome for outcome in failure.outcomes if outcome.state != "ok"]
    if all(outcome.error == "Skipped" for outcome in bad):
        pytest.skip(bad[0].message)
    pytest.fail(str(failure), pytrace=False)


def _forbidden_skips(config: pytest.Config) -> list[str]:
    """Return a line for each skip that ``--no-skips`` does not allow."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not config.getoption("--no-skips"):
        return []
    lines = []
    for skip in reporter.stats.get("skipped", []):
        reason = skip.longrepr[2].removeprefix("Skipped: ")
        if not reason.startswith(_ALLOWED_SKIPS):
            lines.append(f"{skip.nodeid}: {reason}")
    return lines


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session with skips that ``--no-skips`` does not allow."""
    if _forbidden_skips(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Write the skips that failed the session."""
    for line in _forbidden_skips(config):
        terminalreporter.write_line(f"--no-skips: {line}", red=True)
