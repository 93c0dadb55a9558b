"""The public names: few, typed, listed in the stub, readable without torch."""

from __future__ import annotations

import ast
import importlib
import logging
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import statexchange as sx
from statexchange.errors import InvalidArgumentError, StateExchangeError

# Hides torch from a new interpreter.
WITHOUT_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NoTorch())
"""


def test_at_most_30_names_are_at_the_top() -> None:
    assert len(sx.__all__) <= 30
    assert [name for name in dir(sx) if not name.startswith("__")] == sx.__all__


@pytest.mark.parametrize(
    "package", ["statexchange", "statexchange.comm", "statexchange.train", "statexchange.integrations"]
)
def test_each_public_name_exists_and_is_in_the_stub(package: str) -> None:
    module = importlib.import_module(package)
    stub = ast.parse((Path(str(module.__file__)).parent / "__init__.pyi").read_text())
    listed = {
        alias.asname or alias.name for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert listed == set(module.__all__)
    with pytest.raises(AttributeError, match="'nonsense'"):
        _ = module.nonsense


def test_each_public_function_and_class_has_a_docstring() -> None:
    for module in (sx, sx.comm, sx.train, sx.integrations, sx.errors, sx.testing):
        assert module.__doc__
        for name in module.__all__:
            assert getattr(module, name).__doc__, name


@pytest.mark.parametrize(
    "module", [f"statexchange{name}" for name in ("", ".comm", ".train", ".integrations", ".errors")]
)
def test_pydoc_works_without_torch(module: str) -> None:
    script = f"{WITHOUT_TORCH}\nimport pydoc\nprint(pydoc.render_doc({module!r}, renderer=pydoc.plaintext))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert f"NAME\n    {module}" in done.stdout
    if module == "statexchange":
        assert "load_checkpoint(" in done.stdout


def test_a_name_that_needs_torch_names_the_missing_extra() -> None:
    script = WITHOUT_TORCH + textwrap.dedent("""
        import statexchange as sx
        print('train' in dir(sx), 'synchronize' in dir(sx))
        sx.synchronize
        """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "True False\n"
    assert 'pip install "statexchange[torch]"' in done.stderr


def test_a_name_that_needs_another_framework_says_so() -> None:
    script = WITHOUT_TORCH.replace('"torch"', '"transformers"') + textwrap.dedent("""
        import statexchange as sx
        print('RandomState' in dir(sx.integrations), 'CheckpointsTrainer' in dir(sx.integrations))
        sx.integrations.CheckpointsTrainer
        """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "True False\n"
    assert 'CheckpointsTrainer needs transformers: pip install "statexchange[hf]"' in done.stderr


def test_reading_a_workspace_without_torch_names_the_missing_extra(tmp_path: Path) -> None:
    sx.NFSWorkspace(tmp_path / "ws", run="job").write_configs_and_weights({"layers": 2}, {"w": torch.ones(2)})
    script = WITHOUT_TORCH + textwrap.dedent("""
        import statexchange as sx
        try:
            sx.NFSWorkspace(sys.argv[1], run="job").read_configs_and_weights_from_rank(0)
        except sx.errors.MissingExtraError as error:
            print(error)
        """)
    command = [sys.executable, "-c", script, str(tmp_path / "ws")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == 'reading a torch tensor needs torch: pip install "statexchange[torch]"\n'


def test_without_torch_a_load_makes_arrays_of_numpy(tmp_path: Path) -> None:
    arrays = {"w": np.arange(4.0), "inner": {"k": np.ones((2, 2), np.int32)}, "list": [np.zeros(2), 3], "step": 7}
    sx.save_checkpoint(arrays, tmp_path / "saved")
    script = WITHOUT_TORCH + textwrap.dedent("""
        import statexchange as sx
        for state in ({}, {"w": None}):
            sx.load_checkpoint(state, sys.argv[1], strict=False)
            print(type(state["w"]).__name__, state["w"].dtype, state["w"].tolist())
        state = {}
        sx.load_checkpoint(state, sys.argv[1])
        print(state["inner"]["k"].tolist(), state["list"][0].tolist(), state["list"][1], state["step"])
        """)
    command = [sys.executable, "-c", script, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "ndarray float64 [0.0, 1.0, 2.0, 3.0]\n" * 2 + "[[1, 1], [1, 1]] [0.0, 0.0] 3 7\n"


def test_reports_are_one_line_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="statexchange")
    state = {"w": torch.arange(6, dtype=torch.float32), "v": np.ones(2, np.float64)}
    exported = sx.export_checkpoint(state, tmp_path / "out")
    saved = sx.save_checkpoint(state, tmp_path / "saved")
    loaded = sx.load_checkpoint(state, tmp_path / "out")
    merged = sx.merge_checkpoint(tmp_path / "saved", tmp_path / "merged")
    texts = [str(report) for report in (exported, saved, loaded, merged)]
    assert texts[0].startswith("2 tensors, 40 B in ")
    assert texts[0].endswith(f" s -> {tmp_path}/out (1 rank)")
    assert texts[1].endswith(f" s -> {tmp_path}/saved (1 rank)")
    assert texts[2].endswith(f" s <- {tmp_path}/out")
    assert texts[3].endswith(f" s -> {tmp_path}/merged")
    verbs = ("exported", "saved", "loaded", "merged")
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert [f"{verb} {text}" for verb, text in zip(verbs, texts, strict=True)] == messages


def test_every_error_is_one_of_ours_and_in_the_errors_module() -> None:
    errors = [getattr(sx.errors, name) for name in sx.errors.__all__]
    classes = [one for one in errors if isinstance(one, type) and issubclass(one, Exception)]
    assert sx.StateExchangeError in classes
    assert all(issubclass(one, StateExchangeError) for one in classes)
    assert issubclass(InvalidArgumentError, ValueError)
