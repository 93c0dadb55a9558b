"""Command lines of every command, for the tests that run all commands. Each field says which test runs its lines."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

__all__ = ["COMMAND_LINES", "NEEDED", "ON_A_PATH", "ON_SEVERAL_PATHS", "SHARED", "Lines", "words_of"]

OF_BYTES = r"\S+ [kM]?B of \S+ MB \(\d+%\)  \S+ [kM]B/s  \S+ (s|min \d\d s) left"


@dataclass(frozen=True)
class Lines:
    """The command lines of a command, by the test that runs them.

    Attributes:
        shared: what all commands have in common: `test_cli_common.py`, in the directory that `make_sources` writes.
        path: how the command is called on a checkpoint: `test_cli_common.py`, and `test_foreign.py` on what is refused.
            PATH is the checkpoint; PATH... may be several, each with its heading and its error; OUT is a new directory.
        golden: text on terminals of two widths, by the names of the golden files: `test_golden.py`, in the directory
            that `build` writes.
        json: JSON by the schema docs/schemas/COMMAND.json, separated by `|`; each option is in a line:
            `test_schemas.py`, in the directory `place`.
        hostile: names and values that contain escape codes or line breaks, separated by `|`: `test_hostile_names.py`,
            in the directory `hostile`. NAME is such a tensor, NAMED such a directory, TEXT such a text.
        progress: what lasts longer than a second, by name: `test_progress.py`, in the directory `root`.
        without: by field, the reason why the command has no line there.
        rows: types of the lines of its JSON Lines.
        shown: the pattern of its progress.
    """

    shared: str
    json: str
    path: str = ""
    golden: dict[str, str] = field(default_factory=dict)
    hostile: str = ""
    progress: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    rows: tuple[str, ...] = ()
    shown: str = OF_BYTES


NEEDED = [each.name for each in fields(Lines)][:-3]

COMMAND_LINES = {
    "info": Lines(
        shared="info whole",
        path="info PATH...",
        golden={
            "info": "info model",
            "info-tree": "info model --tree",
            "info-workspace": "info workspace",
            "info-saves": "info saves",
            "info-two": "info model absent",
        },
        json="""info save | info workspace | info export --tree | info saves | info broken_saves
            | info unfinished_saves | info missing | info dcp | info ZeRO-2 | info Trainer | info gguf | info nothing
            | info save saves missing nothing | info export --svg i.svg | info
            | info export --tree --depth 2 | info export --svg i2.svg --overwrite""",
        hostile="""info a | info a state.pt | info a --tree | info TEXT | info index | info NAMED
            | info NAMED --tree""",
        without={"progress": "reads headers"},
    ),
    "ls": Lines(
        shared="ls whole",
        path="ls PATH...",
        golden={
            "ls": "ls model",
            "ls-saves": "ls saves",
            "ls-workspace": "ls workspace",
            "ls-rounds": "ls workspace --rounds",
        },
        json="""ls save | ls saves | ls broken_saves | ls unfinished_saves | ls workspace --rounds | ls missing
            | ls torch_file | ls nothing | ls export saves nothing | ls --nosuch
            | ls export --include *w --svg l.svg --overwrite""",
        rows=("tensor", "save", "round"),
        hostile="ls a | ls state.pt | ls a --include nosuch | ls index | ls NAMED",
        without={"progress": "reads headers"},
    ),
    "show": Lines(
        shared="show whole norm.weight",
        path="show PATH",
        golden={
            "show-configs": "show workspace",
            "show-config": "show model",
            "show-tensor": "show model model.layers.0.mlp.down_proj.weight",
            "show-slice": "show model model.embed_tokens.weight --slice 0:3,:5",
            "show-sharded": "show saves/step-000000200 model.w",
            "show-nan": "show broken/nan layers.0.weight",
        },
        json="""show workspace | show save | show export | show torch_file | show torch_file step | show missing
            | show nothing | show export layers.0.w | show workspace layers.1.w --slice 0:2,:3 | show odd nan
            | show changed layers.0.w | show odd nosuch | show export layers.0.w --svg s.svg --overwrite
            | show workspace --rank 1""",
        rows=("region",),
        hostile="""show a | show state.pt | show a NAME | show a nosuch | show state.pt TEXT
            | show NAMED layer.0.w""",
        progress={"show": "show slow://{root}/a w"},
    ),
    "scan": Lines(
        shared="scan .",
        golden={"scan": "scan .", "scan-broken": "scan broken --only broken --sort size", "help-scan": "scan --help"},
        json="scan . | scan export --only broken | scan nothing | scan . --sort size",
        rows=("checkpoint",),
        hostile="scan .",
        without={"path": "has a verdict on each checkpoint, and no error"},
        progress={"scan": "scan slow://{root}"},
        shown=r"\d+ directories, \d+ checkpoints  ",
    ),
    "diff": Lines(
        shared="diff whole other",
        path="diff PATH PATH",
        golden={
            "diff": "diff model trained",
            "diff-stat": "diff model trained --stat",
            "diff-equal": "diff model model",
        },
        json="""diff export huggingface_shards | diff export save | diff odd odd | diff odd other
            | diff export changed | diff odd nothing
            | diff odd other --include * --exclude z* --rename ^n=m --tolerance 1 --stat
            | diff save save --section model | diff ZeRO-2 ZeRO-2
            | diff export export --convert torchtitan:llama3 --convert-with n_heads=2""",
        rows=("tensor",),
        hostile="diff a b | diff a b --stat | diff a state.pt | diff NAMED a",
        progress={"diff": "diff slow://{root}/a slow://{root}/b"},
    ),
    "verify": Lines(
        shared="verify whole",
        path="verify PATH...",
        golden={
            "verify": "verify model",
            "verify-plain": "verify plain",
            "verify-saves": "verify saves",
            "verify-values": "verify model broken/nan --values",
        },
        json="""verify export | verify save --values | verify odd --values | verify odd --against download
            | verify missing | verify changed | verify saves --values | verify broken_saves | verify nothing
            | verify export saves missing | verify odd --values --without nan""",
        rows=("finding", "save"),
        hostile="verify a | verify b --values | verify index | verify NAMED",
        progress={
            "verify": "verify slow://{root}/a",
            "verify --values": "verify slow://{root}/bare-terminal --values",
            "verify saves": "verify slow://{root}/saves",
        },
    ),
    "merge": Lines(
        shared="merge whole out --dry-run",
        path="merge PATH OUT",
        golden={"merge-dry-run": "merge workspace merged --dry-run"},
        json="""merge save m1 --dry-run | merge rank_files m2 --dry-run | merge save m3 | merge missing m4
            | merge nothing m5
            | merge save m6 --dry-run --include * --exclude x* --rename ^layers=l --dtype bf16
                --max-shard-size 1MB --replicas root
            | merge export m7 --dry-run --convert torchtitan:llama3 --convert-with n_heads=2
            | merge ZeRO-2 m8 --dry-run | merge rank_files m9 --dry-run --layout nosuch.json
            | merge export m10 --dry-run --no-files --threads 2 --resume
            | merge save m11 --dry-run --section model --overwrite
                --filename-pattern m{suffix}.safetensors --files-from export""",
        rows=("tensor",),
        hostile="merge a merged --dry-run | merge NAMED merged --dry-run",
        progress={"merge": "merge slow://{root}/a {root}/out-{case}"},
    ),
    "seal": Lines(
        shared="seal bare --dry-run",
        path="seal PATH",
        golden={"seal-dry-run": "seal plain --dry-run"},
        json="seal odd --dry-run | seal huggingface_shards | seal save | seal odd --dry-run --overwrite",
        hostile="seal a --dry-run | seal NAMED --dry-run",
        progress={"seal": "seal slow://{root}/bare-{case}"},
    ),
    "prune": Lines(
        shared="prune saves --keep 1 --dry-run",
        golden={"prune-dry-run": "prune saves --keep 1 --dry-run"},
        json="""prune saves --keep 1 --dry-run | prune broken_saves --keep 1 --dry-run | prune nothing --keep 1
            | prune unfinished_saves --keep 1 | prune saves --keep 1 --keep-every 10 --best loss:min --dry-run""",
        rows=("save",),
        hostile="prune NAMED --keep 1 | prune TEXT --keep 1",
        without={"path": "removes saves and versions", "progress": "removes files, which are not read"},
    ),
    "demo": Lines(
        shared="demo --ranks 1 --steps 2",
        json="demo --nosuch | demo --ranks 0 --keep kept --steps 1",
        without={
            "path": "reads no path",
            "golden": "writes other numbers each time",
            "hostile": "reads no path",
            "progress": "shows each step: test_demo_on_a_terminal_is_one_live_line",
        },
    ),
}

SHARED = [lines.shared.split() for name, lines in COMMAND_LINES.items() if name != "demo"]
"""One line of each command but `demo`, whose output varies."""

ON_A_PATH = [name for name, lines in COMMAND_LINES.items() if lines.path]
ON_SEVERAL_PATHS = [name for name in ON_A_PATH if COMMAND_LINES[name].path.endswith("...")]


def words_of(name: str, path: object, out: object) -> list[str]:
    """Return the command line of a command on the checkpoint at `path`; what it writes is at `out`."""
    words = {"PATH": str(path), "PATH...": str(path), "OUT": str(out)}
    return [words.get(word, word) for word in COMMAND_LINES[name].path.split()]
