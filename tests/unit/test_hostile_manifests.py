"""Small files that request much memory or time: the cost of a reader is bounded by the bytes of its files.

One child process with little memory and time reads all of them. Each case is one command with the exit code and
the words that it must end with.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from commands import command_environment
from hostile_frameworks import (
    a_list_in_itself,
    a_permutation_of_many_parts,
    a_permutation_of_nothing,
    buffers_in_each_other,
    files_that_each_ask_for_little,
    groups_of_equal_shapes,
    layers_of_nothing,
    names_in_each_other,
    numbers_of_numbers,
    permutations_one_after_another,
    places_again_and_again,
    states_again_and_again,
)
from hostile_manifests import (
    a_deep_config,
    a_little_expanded,
    a_long_dotted_name,
    a_mesh_of_many_axes,
    aliases_of_lists,
    an_index_of_absent_files,
    an_index_of_absent_torch_files,
    deep_shape,
    deep_value,
    dense_header,
    dense_keys,
    dense_manifest,
    empty_boxes,
    empty_dim,
    expanded,
    far_offsets,
    far_shape,
    long_facts,
    many_columns,
    negative_rank,
    no_files,
    other_shape,
    overlapping,
    part_with_boxes,
    smaller_sparse_index,
    sparse_index,
    strided_in_many,
    strided_often,
    twelve_dims,
    whole,
)

from statexchange.errors import NotFoundError, PeerError, StorageError, without_secrets
from statexchange.storage.workspace import Workspace

pytestmark = pytest.mark.timeout(120)  # so that one worker has all tests of this file, which share one process

MEMORY_BYTES, CPU_SECONDS = 1 << 30, 25
CHILD = f"""
import contextlib, io, json, resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY_BYTES}, {MEMORY_BYTES}))
resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
from statexchange.cli.main import main
for line in sys.stdin:
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        try:
            main(json.loads(line))
        except SystemExit as ended:
            code = ended.code
    print(json.dumps([code, text.getvalue()]), flush=True)
"""


@dataclass(frozen=True)
class Case:
    """A command on the files that `make` writes, the exit code that it must have, and words that it must print."""

    make: Callable[[Path], None]
    command: str
    code: int
    says: str


CASES = [
    Case(empty_dim, "verify IN", 0, "every digest agrees"),
    Case(empty_dim, "merge IN OUT", 0, "merged 1 tensor, 0 B"),
    Case(empty_boxes, "info IN", 0, "tensors     1"),
    Case(empty_boxes, "verify IN", 0, "3 regions, 0 B"),
    Case(twelve_dims, "verify IN", 7, "cannot prove that 9000 boxes cut along 12 dims at once cover the tensor"),
    Case(many_columns, "verify IN", 0, "20,000 regions, 328 MB"),
    Case(dense_header, "merge IN OUT", 4, "would take too much memory"),
    Case(dense_keys, "info IN/model.safetensors", 4, "would take too much memory"),
    Case(dense_manifest, "verify IN", 4, "would take too much memory"),
    Case(sparse_index, "info IN", 4, "more than the limit"),
    Case(smaller_sparse_index, "verify IN", 4, "broken JSON: byte 16 is zero, as if it had not been written"),
    Case(other_shape, "verify IN", 4, "file and manifest disagree"),
    Case(part_with_boxes, "verify IN", 4, "file and manifest disagree"),
    Case(far_offsets, "info IN", 4, "no tensor has a shape of 64 dims that is so large"),
    Case(far_offsets, "verify IN/model.safetensors", 4, "no tensor has a shape of 64 dims that is so large"),
    Case(far_shape, "info IN", 4, "broken manifest"),
    Case(expanded, "info IN/model.pt", 7, "more than 16 times its files' bytes"),
    Case(expanded, "verify IN/model.pt", 7, "save them with .contiguous()"),
    Case(expanded, "merge IN OUT", 7, "save them with .contiguous()"),
    Case(overlapping, "verify IN", 7, "save them with .contiguous()"),
    Case(a_little_expanded, "merge IN OUT", 0, "merged 1 tensor, 16.0 kB"),
    Case(strided_often, "info IN", 4, "it refers to the same objects so often"),
    Case(strided_in_many, "verify IN", 4, "it refers to the same objects so often"),
    Case(a_mesh_of_many_axes, "verify IN", 4, "does not fit its placements"),
    Case(deep_shape, "info IN", 4, "not what torch writes"),
    Case(deep_value, "verify IN", 4, "nested more than 100 levels deep"),
    Case(a_deep_config, "show IN", 4, "nested more than 100 levels deep"),
    Case(a_deep_config, "show IN --json", 4, "nested more than 100 levels deep"),
    Case(a_deep_config, "info IN", 0, "tensors     1"),
    Case(a_deep_config, "merge IN OUT --dtype bf16", 0, "merged 1 tensor"),
    Case(an_index_of_absent_files, "info IN", 5, "10,000 tensors are listed but cannot be read"),
    Case(an_index_of_absent_torch_files, "info IN", 4, "10,000 tensors are listed but cannot be read"),
    Case(long_facts, "verify IN", 4, "its metadata is of another version: expected 1, found 'a.a."),
    Case(a_long_dotted_name, "merge IN OUT", 4, "does not fit its placements"),
    Case(aliases_of_lists, "info IN", 4, "its aliases do not map names to names"),
    Case(negative_rank, "info IN", 4, "not a box: ['00"),
    Case(no_files, "info IN", 4, "broken manifest"),
    Case(no_files, "merge GOOD IN --overwrite", 4, "it lists no files"),
    Case(groups_of_equal_shapes, "info IN", 4, "it refers to the same objects so often"),
    Case(buffers_in_each_other, "info IN", 4, "KeyError('single_partition_of_fp32_groups')"),
    Case(names_in_each_other, "info IN", 4, "not what DeepSpeed writes"),
    Case(places_again_and_again, "info IN", 4, "it refers to the same objects so often"),
    Case(states_again_and_again, "info IN", 4, "it refers to the same objects so often"),
    Case(a_list_in_itself, "info IN", 0, "list of 9000"),
    Case(files_that_each_ask_for_little, "info IN", 4, "it refers to the same objects so often"),
    Case(files_that_each_ask_for_little, "info IN/model_rank_0.pt", 0, "tensors     0"),
    Case(numbers_of_numbers, "merge IN OUT --convert IN/conversion.json", 2, "pad to 1 (n0 = 1), but dim 0 has 4"),
    Case(a_permutation_of_nothing, "merge IN OUT --convert IN/conversion.json", 0, "merged 1 tensor, 0 B"),
    Case(permutations_one_after_another, "merge IN OUT --convert IN/conversion.json", 7, "at most 1048576 indices"),
    Case(a_permutation_of_many_parts, "merge IN OUT --convert IN/conversion.json", 7, "would be cut into"),
    Case(layers_of_nothing, "merge IN OUT --convert IN/conversion.json", 7, "would become 1048576 tensors and more"),
    Case(whole, "info zip://hf::/x.zip", 3, "no such path [zip://hf::/x.zip]"),
]

URL_COMMANDS = [
    "info http://joe_SECRET:PW_SECRET@127.0.0.1:9/x.safetensors?X-Amz-Signature=SIG_SECRET",
    "verify zip://a::http://joe_SECRET:PW_SECRET@127.0.0.1:9/x.zip?X-Amz-Signature=SIG_SECRET",
    "ls nosuch://joe_SECRET:PW_SECRET@127.0.0.1/x?SIG_SECRET",
    "info one http://joe_SECRET:PW_SECRET@127.0.0.1:9/x?SIG_SECRET",
    "info memory://joe_SECRET:PW_SECRET@host/x?SIG_SECRET",
    "merge memory://me_SECRET:PW_SECRET@host/x?SIG_SECRET https://me_SECRET:PW_SECRET@127.0.0.1:9/x?SIG_SECRET --json",
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Return exit code and output of each case's command, all from one process with little memory and time."""
    root = tmp_path_factory.mktemp("hostile")
    good = root / "good"
    good.mkdir()
    whole(good)
    lines = []
    for number, case in enumerate(CASES):
        path = root / case.make.__name__
        if not path.exists():
            path.mkdir()
            case.make(path)
        places = {"IN": str(path), "OUT": str(root / f"out-{number}"), "GOOD": str(good)}
        words = [places.get(word.partition("/")[0], word.partition("/")[0]) for word in case.command.split()]
        rests = [word.partition("/")[1:] for word in case.command.split()]
        lines.append(json.dumps([word + "".join(rest) for word, rest in zip(words, rests, strict=True)]))
    lines += [json.dumps(command.split()) for command in URL_COMMANDS]
    environment = command_environment(OPENBLAS_NUM_THREADS="1")
    command = [sys.executable, "-c", CHILD]
    done = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    found = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    missing = [(None, f"the process ended with {done.returncode}: {done.stderr}")] * (len(lines) - len(found))
    return dict(zip([*map(_name, CASES), *URL_COMMANDS], [*found, *missing], strict=True))


def _name(case: Case) -> str:
    return f"{case.make.__name__}-{case.command}"


@pytest.mark.parametrize("case", CASES, ids=_name)
def test_a_small_hostile_manifest_is_named_within_limits_of_memory_and_time(
    case: Case, ended: dict[str, tuple[int, str]]
) -> None:
    code, output = ended[_name(case)]
    assert (code, "Traceback" in output) == (case.code, False), output[-2000:]
    assert case.says in output


# Streams that are closed


def run_closed(redirections: str, *arguments: object) -> tuple[int, str]:
    shell = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "statexchange"]
    environment = command_environment(OPENBLAS_NUM_THREADS="1")
    command = [*shell, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr


def test_closed_streams_have_their_exit_code(tmp_path: Path) -> None:
    whole(tmp_path)
    assert run_closed(">&-", "info", tmp_path) == (8, "error: cannot write the output: Bad file descriptor\n")
    assert run_closed("0<&- >&- 2>&-", "info", tmp_path / "gone") == (3, "")
    code, output = run_closed("2>&-", "merge", tmp_path, tmp_path / "out", "--json")
    assert (code, json.loads(output)["code"]) == (0, "OK")


# Secrets in URLs


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://joe:PW@host:80/x.safetensors?X-Amz-Signature=SIG", "http://host:80/x.safetensors"),
        ("s3://KEY:PW@bucket/a@b/c", "s3://bucket/a@b/c"),
        ("s3://bucket/a@b/c", "s3://bucket/a@b/c"),
        ("http://joe:P/W@host/x?SIG", "http://host/x"),
        ("http://joe:P?W@host/x?SIG", "http://host/x"),
        ("http://[::1]:80/a@b?SIG", "http://[::1]:80/a@b"),
        ("zip://a.bin?SIG::http://joe:PW@host/x.zip?SIG", "zip://a.bin::http://host/x.zip"),
        ("simplecache::s3://KEY:PW@bucket/x", "simplecache::s3://bucket/x"),
        ("see 'http://joe:PW@h/x?SIG' or \"http://h/y?SIG\" too", "see 'http://h/x' or \"http://h/y\" too"),
        ("file:///a/b?c@d", "file:///a/b?c@d"),
        ("shm://name", "shm://name"),
        ("/a/b?c", "/a/b?c"),
    ],
)
def test_a_url_is_shown_without_user_password_and_query(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
    assert without_secrets(shown) == shown


def test_errors_and_reprs_show_no_secrets() -> None:
    url = "s3://KEY:PW@bucket/x?SIG"
    texts = [str(NotFoundError(f"not {url!r}", path=url)), repr(StorageError("no").located(path=url))]
    texts += [str(PeerError(1, "reading", f"no {url}")), PeerError(1, "reading", f"no {url}").cause]
    for text in (*texts, repr(Workspace(url))):
        assert "bucket" in text or text == "StorageError('no [s3://bucket/x]')"
        assert not any(secret in text for secret in ("KEY", "PW", "SIG"))


@pytest.mark.parametrize("command", URL_COMMANDS)
def test_the_command_line_shows_no_secrets(command: str, ended: dict[str, tuple[int, str]]) -> None:
    code, output = ended[command]
    assert code in (2, 3, 7, 8), output
    assert "Traceback" not in output
    assert "_SECRET" not in output  # no shorter word: the output names the current directory


def test_special_files_behind_a_url_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.zip")
    code, output = run_closed("", "info", f"zip://hf::{tmp_path}/x.zip")
    assert (code, output.count("refused: not a regular file")) == (7, 1), output
