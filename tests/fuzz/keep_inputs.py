"""A plugin of pytest that keeps the files which tests write as first inputs of `atheris_readers.py`.

    PYTHONPATH=tests/fuzz FUZZ_CORPUS=corpus pytest -p keep_inputs -n 0 tests/unit tests/ranks/test_torch_file*.py

What the suite covers is then where the search begins. Inputs go to the directories pickle, header and manifest
in that of FUZZ_CORPUS, for --corpus; each once, under the digest of its bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from atheris_readers import MAX_BYTES, inputs_of

_TARGETS = ("pickle", "header", "manifest")


@pytest.fixture(autouse=True)
def _files_are_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    folder: Path | None = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    files = [] if folder is None else [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    for path in files:
        if not 0 < path.stat().st_size < MAX_BYTES or not os.access(path, os.R_OK):
            continue
        for target in _TARGETS:
            kept = Path(os.environ["FUZZ_CORPUS"], target)
            kept.mkdir(parents=True, exist_ok=True)
            for data in _inputs(target, path):
                (kept / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)


def _inputs(target: str, path: Path) -> list[bytes]:
    try:
        return inputs_of(target, path)
    except Exception:  # noqa: BLE001 (the test has broken the file, and it is not one of a known kind any longer)
        return []
