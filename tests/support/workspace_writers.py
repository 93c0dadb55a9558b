"""Writers of rounds of a workspace."""

import subprocess
from pathlib import Path

from warm_python import warm_python

from statexchange.storage.workspace import RankName, Workspace

WRITER = """
import json, sys
import numpy as np
from statexchange import NFSWorkspace
from statexchange.errors import StateExchangeError
path, value = sys.argv[1], int(sys.argv[2])
try:
    weights = {name: np.full(9000, value, np.uint8) for name in "ab"}
    NFSWorkspace(path, run="job").write_configs_and_weights(value, weights)
except StateExchangeError as error:
    print(json.dumps([type(error).__name__, getattr(error, "errno", None), error.path]))
"""


def write_value(path: Path, value: int) -> None:
    command = [warm_python("commands"), "-c", WRITER, str(path), str(value)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def opens(workspace: Workspace, name: RankName) -> None:
    with workspace.open(name):
        pass


def rounds_of(workspace: Workspace) -> list[int]:
    with workspace.view() as view:
        return view.rounds("job")


def names_in(workspace: Workspace) -> list[RankName]:
    """Return the names in the first round."""
    with workspace.view() as view:
        return view.rank_names("job", 1)
