"""Run a program so that each Python that it starts is forked, too: `PYTHON warm_program.py PYTHON -m MODULE WORDS`.

A script may stand for `-m MODULE`. PYTHON is what `warm_python` returns: the program finds it in `sys.executable`, and
so does what starts ranks for it, multiprocessing's fork server and mpiexec.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys


def _run(python: str, words: list[str]) -> None:
    sys.executable = python
    multiprocessing.set_executable(python)
    if words[0] == "-m":
        sys.argv, sys.path[0] = ["-m", *words[2:]], os.getcwd()
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words, os.path.dirname(words[0])
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2:])
