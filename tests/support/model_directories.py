"""Directories that programs read wrongly, from public issues: how each is read, beside what a person wants of it.

A row of the table is a function with `@row` in `model_shards.py` or `model_neighbours.py`: it writes a small directory
and returns what is wanted, `Tensors` or `Refused`; its docstring says why. What was wanted was written before the first
run. `python tests/support/model_directories.py` prints the table with both outcomes, that of statexchange and that of
transformers or PEFT.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import model_neighbours  # noqa: F401 (its rows)
import model_shards  # noqa: F401 (its rows)
import torch
from model_rows import (
    ROWS,
    Folder,
    Refused,
    Row,
    State,
    Tensors,
)
from safetensors.torch import load_file
from tiny_models import TINY

import statexchange as sx

# ----------------------------------------------------------------------------------------------------------- outcomes


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program for a directory: its tensors or its error, and its output."""

    state: State | None
    error: BaseException | None
    text: str = ""

    def __str__(self) -> str:
        if self.error is not None:
            return f"{type(self.error).__name__}: {' '.join(str(self.error).split())}"
        assert self.state is not None
        return f"{len(self.state)} tensors{'; ' if self.text else ''}{' '.join(self.text.split())}"


@dataclass(frozen=True)
class Result:
    """The outcomes of a row, and what is not as it was wanted."""

    ours: Outcome
    peer: Outcome | None
    comparison: str
    faults: list[str]


def merged(path: Path, target: Path) -> tuple[State, str]:
    """Merge; return the tensors of the output, with the tied ones, and the notes."""
    report = sx.merge_checkpoint(path, target)
    state: State = {}
    for name, _ in report.files:
        state.update(load_file(target / name))
    for alias, name in report.aliases.items():
        state[alias] = state[name]
    return state, "\n".join(report.notes)


def opened(path: Path) -> tuple[State, str]:
    """Return the tensors that `open_checkpoint` reads."""
    with sx.open_checkpoint(path) as checkpoint:
        return {name: checkpoint[name].read(framework="pt") for name in checkpoint}, ""


def printed(command: str, path: Path) -> str:
    """Return what a command prints."""
    from statexchange.cli.main import main

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), contextlib.suppress(SystemExit):
        main([command, str(path)])
    return output.getvalue()


def differences(wanted: State, state: State) -> list[str]:
    """Return the names whose tensors differ in dtype, shape or bits, or that only one of the two has."""
    differing = sorted(wanted.keys() ^ state.keys())
    for name in sorted(wanted.keys() & state.keys()):
        if wanted[name].dtype != state[name].dtype or not torch.equal(wanted[name], state[name]):
            differing.append(name)
    return differing


@contextlib.contextmanager
def quiet_peer() -> Iterator[None]:
    """Silence the logs and warnings of transformers and PEFT."""
    import transformers

    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def from_pretrained(path: Path, peer: str = "causal") -> tuple[State, str]:
    """Return the tensors that transformers or PEFT has read, and the names of those that it made at random."""
    kind, _, variant = peer.partition(":")
    if kind == "peft":
        return _from_peft(path)
    from transformers import AutoModel, AutoModelForCausalLM

    loader = AutoModel if kind == "bert" else AutoModelForCausalLM
    options = {"variant": variant} if variant else {}
    with quiet_peer():
        model, info = loader.from_pretrained(path, output_loading_info=True, dtype="auto", **options)
    random = {*info["missing_keys"], *(entry[0] for entry in info["mismatched_keys"])}
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in random}
    return state, f"random: {', '.join(sorted(random))}" if random else ""


def _from_peft(path: Path) -> tuple[State, str]:
    from peft import PeftModel
    from transformers import LlamaConfig, LlamaForCausalLM

    with quiet_peer():
        base = LlamaForCausalLM(LlamaConfig(**{**TINY, "num_hidden_layers": 1}))
        before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
        state = PeftModel.from_pretrained(base, path).state_dict()
    read = {}
    for name, tensor in state.items():
        plain = name.replace(".default.", ".").replace(".base_layer.", ".")
        unchanged = before.get(plain.removeprefix("base_model.model."))
        if unchanged is None or not torch.equal(unchanged, tensor):
            read[plain] = tensor
    return read, ""


def outcome(program: Callable[[], tuple[State, str]]) -> Outcome:
    """Run a program and return its outcome; any error is one."""
    try:
        state, text = program()
    except Exception as error:  # noqa: BLE001 - the table shows whatever a program raises
        return Outcome(None, error)
    return Outcome(state, None, text)


def compared(ours: Outcome, peer: Outcome, renamed: Callable[[str], str] = str) -> str:
    """Say how the outcome of a peer compares with ours; it begins with "same" if the tensors of both are equal."""
    if peer.state is None or ours.state is None:
        return "an error" if peer.state is None else "reads it"
    state = {renamed(name): tensor for name, tensor in ours.state.items()}
    both = [name for name in peer.state if name in state]
    differing = [name for name in both if not torch.equal(state[name], peer.state[name].to(state[name].dtype))]
    if differing:
        return f"differs in {', '.join(differing[:3])}"
    more = [name for name in peer.state if name not in state]
    lacks = [name for name in state if name not in peer.state]
    word = f"has {', '.join(more[:3])}, too" if more else "same"
    return f"{word}, without {', '.join(lacks[:2])}" if lacks else word


def _faults_of_refusal(wanted: Refused, ours: Outcome, path: Path) -> list[str]:
    if not isinstance(ours.error, wanted.error):
        return [f"not refused as wanted, but: {ours}"]
    said = {"merge": str(ours.error), "verify": printed("verify", path)}
    if not wanted.by_bytes:
        said["info"] = printed("info", path)
    faults = []
    for command, text in said.items():
        faults += [f"{command} does not say {word!r}: {text}" for word in wanted.words if word not in text]
        faults += [f"{command} says {word!r}: {text}" for word in wanted.lacks if word in text]
    if wanted.scan:
        text = printed("scan", path)
        faults += [f"scan does not list {word!r}: {text}" for word in wanted.scan if word not in text]
    return faults


def _faults_of_tensors(wanted: Tensors, ours: Outcome, path: Path) -> list[str]:
    if ours.state is None:
        return [f"refused: {ours}"]
    faults = [f"merge: tensor {name}" for name in differences(wanted.state, ours.state)]
    by_opening = outcome(lambda: opened(path))
    if by_opening.state is None:
        faults.append(f"open_checkpoint: {by_opening}")
    else:
        faults += [f"open_checkpoint: tensor {name}" for name in differences(wanted.state, by_opening.state)]
    said = {"merge": ours.text, "info": printed("info", path), "verify": printed("verify", path)}
    for command, text in said.items():
        faults += [f"{command} does not say {word!r}: {text}" for word in wanted.notes if word not in text]
    faults += [f"merge does not say {word!r}: {ours.text}" for word in wanted.merge_notes if word not in ours.text]
    return faults


def run(entry: Row, directory: Path) -> Result:
    """Make the directory of a row, and return what statexchange and the peer do with it."""
    folder, target = Folder(directory / "source"), directory / "out"
    folder.path.mkdir()
    wanted = entry.make(folder)
    path = folder.opened or folder.path
    ours = outcome(lambda: merged(path, target))
    is_refusal = isinstance(wanted, Refused)
    faults = _faults_of_refusal(wanted, ours, path) if is_refusal else _faults_of_tensors(wanted, ours, path)
    if not entry.peer:
        return Result(ours, None, "", faults)
    peer_path, peer_name = (target, "causal") if entry.peer == "merged" else (path, entry.peer)
    peer = outcome(lambda: from_pretrained(peer_path, peer_name))
    comparison = compared(ours, peer, entry.renamed)
    if entry.agrees and not comparison.startswith("same"):
        faults.append(f"{entry.peer} {comparison}: {peer}")
    return Result(ours, peer, comparison, faults)


def main() -> None:
    """Print the table with both outcomes."""
    for name, entry in ROWS.items():
        with tempfile.TemporaryDirectory() as directory:
            result = run(entry, Path(directory))
            print(f"{name} ({entry.origin}): {'NOT as wanted' if result.faults else 'as wanted'}")
            print(f"  statexchange: {str(result.ours).replace(directory, '')[:200]}")
            if result.peer is not None:
                print(f"  {entry.peer}: {result.comparison}: {str(result.peer).replace(directory, '')[:160]}")
            for fault in result.faults:
                print(f"  FAULT: {' '.join(fault.replace(directory, '').split())[:300]}")


if __name__ == "__main__":
    main()
