"""The output of all commands on a terminal of 80 and of 200 columns: the files in tests/data/golden.

After a change that is meant, write the files anew and read what changed in them:

    python tests/support/golden.py --rewrite
    git diff tests/data/golden

One process with a pseudo-terminal runs all commands of a width. Escape codes are shown as \\x1b. Dates, seconds
and the temporary directory, which differ between runs, are replaced, and progress is removed.
"""

import fcntl
import json
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import numpy as np
from command_lines import COMMAND_LINES
from commands import LAUNCHER_VARIABLES, command_environment
from safetensors.numpy import save_file
from stored import DATA

import statexchange as sx
from statexchange.testing import run_ranks

__all__ = ["GOLDEN", "GOLDEN_LINES", "WIDTHS", "build", "golden_file", "golden_text", "run_lines"]

GOLDEN = DATA / "golden"
WIDTHS = (80, 200)
GOLDEN_LINES = {
    "help": ["--help"],
    **{name: line.split() for lines in COMMAND_LINES.values() for name, line in lines.golden.items()},
    "error-usage": ["inof", "model"],
    "error-not-found": ["info", "absent"],
    "error-pattern": ["ls", "model", "--include", "model.layer.*"],
    "error-corrupt": ["verify", "broken/flipped"],
    "error-truncated": ["info", "broken/truncated"],
    "error-incomplete": ["verify", "broken/missing"],
    "error-io": ["merge", "plain", "/proc/merged"],
    "error-exists": ["merge", "plain", "model"],
    "error-refused": ["info", "broken/pickle"],
}
RUN_ALL = """
import json, sys
from statexchange.cli.main import main
for name, arguments in json.loads(sys.argv[1]):
    print(f"\\x1e{name}\\x1f", end="", flush=True)
    try:
        main(arguments)
    except SystemExit as ended:
        print(f"[exit code {ended.code}]", flush=True)
"""


def llama(layers: int = 2) -> dict[str, np.ndarray]:
    """Return small weights with the names of a Llama, always the same."""
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, 16), "model.norm.weight": (16,)}
    for n in range(layers):
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"model.layers.{n}.self_attn.{part}.weight"] = (16, 16)
        for part in ("gate_proj", "up_proj"):
            shapes[f"model.layers.{n}.mlp.{part}.weight"] = (40, 16)
        shapes[f"model.layers.{n}.mlp.down_proj.weight"] = (16, 40)
        shapes[f"model.layers.{n}.input_layernorm.weight"] = (16,)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_model(path: Path, state: dict[str, np.ndarray]) -> None:
    sx.export_checkpoint(state, path, max_shard_size="12KB")
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
    (path / "config.json").write_text(json.dumps(config, indent=2))


def write_plain(path: Path, state: dict[str, np.ndarray]) -> None:
    path.mkdir(parents=True)
    save_file(state, path / "model.safetensors")


def write_workspace(path: Path) -> None:
    """Write two rounds of three ranks, the last rank without its second; the configs of ranks differ."""
    saved = {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}
    try:
        for rank in range(3):
            os.environ.update(RANK=str(rank), WORLD_SIZE="3")
            workspace = sx.NFSWorkspace(path, run="job")
            for _ in range(1 if rank == 2 else 2):
                config = {"lr": 0.001, "model": {"hidden": 16, "layers": 2}, "first_row": 4 * rank}
                workspace.write_configs_and_weights(config, {f"part{rank}.weight": np.full((4, 16), rank, np.float32)})
    finally:
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        os.environ.update(saved)


def write_saves(path: Path) -> None:
    def rank_main() -> None:
        saves = sx.Checkpoints(path, keep=None, layout={"model.w": {"dim": 0}})
        for step in (100, 200):
            rows = np.arange(32, dtype=np.float32).reshape(4, 8) + 32 * sx.get_rank()
            saves.save({"model": {"w": rows, "b": np.ones(8, np.float32)}}, step, metrics={"loss": 50 / step})

    run_ranks(rank_main, 2)


def build(root: Path) -> None:
    """Write checkpoints of several kinds; four of those below `broken` are broken in different ways."""
    state = llama()
    write_model(root / "model", state)
    trained = {name: tensor.copy() for name, tensor in state.items() if "layers.1.mlp.down" not in name}
    trained["model.layers.0.mlp.up_proj.weight"] *= 1.001
    trained["model.layers.1.self_attn.q_proj.weight"][3, 5] += 2
    trained["model.norm.weight"][7] = np.nan
    trained["model.layers.0.input_layernorm.weight"] = np.ones(24, np.float32)
    trained["lm_head.weight"] = np.ones((64, 16), np.float32)
    write_model(root / "trained", trained)
    write_plain(root / "plain", state)
    write_workspace(root / "workspace")
    write_saves(root / "saves")
    broken = root / "broken"
    for name in ("missing", "flipped"):
        write_model(broken / name, state)
    next((broken / "missing").glob("model-00002-*")).unlink()
    file = next((broken / "flipped").glob("model-00001-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    write_plain(broken / "truncated", state)
    file = broken / "truncated/model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    values = {f"layers.{n}.weight": np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64) for n in range(3)}
    values["layers.0.weight"][5, 6:9] = np.nan
    values["layers.1.weight"][40:] = 0
    values["layers.2.weight"][:] = 0
    write_plain(broken / "nan", values)
    (broken / "pickle").mkdir()
    (broken / "pickle/model.bin").write_bytes(b"\x80\x04cposix\nsystem\n.")
    three_days_ago = time.time() - 3 * 24 * 3600 - 600
    for path in root.rglob("*"):
        os.utime(path, (three_days_ago, three_days_ago))


def run_lines(root: Path, width: int) -> dict[str, str]:
    """Run all commands in `root` on a terminal of `width` columns; return what each wrote."""
    environment = command_environment(PYTHONUTF8="1", TERM="xterm-256color", TZ="UTC")
    for name in ("COLUMNS", "LINES"):  # of the terminal that the tests run in
        environment.pop(name, None)
    here, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", RUN_ALL, json.dumps(list(GOLDEN_LINES.items()))],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        cwd=root,
        env=environment,
    )
    os.close(terminal)
    written = bytearray()
    while True:
        try:
            data = os.read(here, 65536)
        except OSError:  # EIO: the process has closed the terminal
            break
        if not data:
            break
        written += data
    os.close(here)
    parts = written.decode().split("\x1e")
    assert process.wait() == 0, parts[-1]
    assert parts[0] == ""
    return {name: normalised(text, root) for name, _, text in (part.partition("\x1f") for part in parts[1:])}


def normalised(text: str, root: Path) -> str:
    """Show escape codes, and replace what differs between runs."""
    text = text.replace("\r\n", "\n").replace(os.fspath(root.resolve()), "/folder")
    text = re.sub(r"\r[^\r\n]*\x1b\[K", "", text)  # progress
    text = re.sub(r"\d{4}-\d\d-\d\d([T ])\d\d:\d\d:\d\d", r"2026-01-01\g<1>00:00:00", text)
    text = re.sub(r"\bin \d\S* (s|ms)\b", "in 0.01 s", text)
    return text.replace("\x1b", "\\x1b")


def golden_file(name: str, width: int) -> Path:
    return GOLDEN / f"{name}-{width}.txt"


def golden_text(name: str, output: str) -> str:
    """Return what the file of a command line has: the line and its output."""
    return f"$ statexchange {' '.join(GOLDEN_LINES[name])}\n{output}"


def rewrite() -> None:
    """Write the golden files anew."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    GOLDEN.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        for width in WIDTHS:
            for name, text in run_lines(Path(folder), width).items():
                golden_file(name, width).write_text(golden_text(name, text))


if __name__ == "__main__":
    if sys.argv[1:] != ["--rewrite"]:
        sys.exit(__doc__)
    rewrite()
