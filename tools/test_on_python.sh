#!/usr/bin/env bash
# Runs tests on another version of Python, in an environment of its own:
#
#   tools/test_on_python.sh 3.13                    # without torch, with the versions of tools/constraints.txt
#   tools/test_on_python.sh 3.10 lowest             # with the lowest versions that pyproject.toml claims
#   tools/test_on_python.sh 3.10 lowest torch       # and with torch, whose wheels for CUDA take some gigabytes
#
# The interpreter, which has pip, is looked up on PATH and among pyenv's. Exit status 77: it is not installed on this
# machine. $WHEEL names a wheel of this checkout to install; without it one is built.
set -euo pipefail
cd "$(dirname "$0")/.."
version=$1 pins=${2:-} extra=${3:-}
python=$(command -v "python$version" || true)
[ -n "$python" ] && "$python" -c '' 2>/dev/null || python=$(ls -d ~/.pyenv/versions/"$version".*/bin/python 2>/dev/null | tail -1)
[ -n "$python" ] || { echo "Python $version is not on this machine" >&2; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv --without-pip "$work/venv" # to install pip there takes 5 s
constraints=tools/constraints.txt
if [ "$pins" = lowest ]; then
    constraints=$work/lowest.txt # "click>=8.1" becomes "click==8.1"
    sed -n '/^dependencies/,/^]/p; /^torch = /p; /^mpi = /p' pyproject.toml | grep -o '"[A-Za-z0-9_-]*>=[0-9.]*"' | tr -d '"' | sed 's/>=/==/' >"$constraints"
fi
# pyproject.toml claims no lowest versions of the tools that only tests need, so they are not pinned.
# Bytecode: pip would compile all of numpy and pygments; tests write that of what they import, but none of the package.
unset PYTHONDONTWRITEBYTECODE
"$python" -m pip --python "$work/venv/bin/python" install -q --no-compile -c "$constraints" \
    "${WHEEL:-.}${extra:+[$extra]}" pytest pytest-timeout pytest-xdist hypothesis tomli
"$work/venv/bin/python" -m compileall -q "$work"/venv/lib/python*/site-packages/statexchange
tests=(
    tests/unit/test_cgroups.py tests/unit/test_dependencies.py tests/unit/test_docs.py tests/unit/test_errors.py
    tests/unit/test_pictures.py tests/unit/test_regions.py tests/unit/test_version_0_1.py tests/unit/test_workspace*.py
    tests/ranks/test_pages.py
)
# Without torch: no tests that read tensors of ranks, which become torch's. cli.md: older click prints usage differently.
left_out="not workspaces.md and not a_ranks_file and not cli.md"
if [ -n "$extra" ]; then
    tests+=(tests/unit/test_sources.py tests/ranks/test_gather*.py tests/ranks/test_readme.py)
    left_out="not cli.md"
fi
unset PYTHONPATH # it may name another checkout
export PET_STANDALONE=1 # torchrun --standalone: without it torch 2.6 always takes port 29500, which another job may have
"$work/venv/bin/python" -c 'import importlib.metadata as m, platform, sys
print("Python", platform.python_version(), *(f"{n} {m.version(n)}" for n in sys.argv[1:]))' numpy statexchange $extra
"$work/venv/bin/python" -m pytest -p no:cacheprovider -k "$left_out" "${tests[@]}"
