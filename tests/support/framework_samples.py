"""Samples that training frameworks wrote."""

import shutil
from pathlib import Path

from stored import DATA


def copied(path: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / path, tmp_path / "copy"))
