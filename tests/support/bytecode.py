"""Bytecode of installed packages that pip has not compiled (`pip install --no-compile`), for the processes of tests.

pip takes 45 s to compile all of torch and transformers, of which tests import a part: here that
part is compiled in 15 s.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from warm_python import warm_python

__all__ = ["compile_imports"]

# What processes of tests import beside MODULES of warm_python.py. What imports torch comes last: the warm server has
# compiled torch by then.
_IMPORTED = (
    "moto.server",
    "s3fs",
    "hypothesis",
    "xdist",
    "numpy.testing",
    "mpi4py.util",
    "fsspec.implementations.http",
    "torch.distributed.run",
)
_IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
"""


def compile_imports() -> None:
    """Import the packages once in processes that write bytecode, unless pip has compiled them."""
    found = importlib.util.find_spec("peft")  # nothing imports it before the tests do
    if found is None or found.origin is None or os.path.exists(importlib.util.cache_from_source(found.origin)):
        return
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with subprocess.Popen([sys.executable, "-c", _IMPORT, *_IMPORTED], env=environ):
        warm_python("transformers")  # at the same time
