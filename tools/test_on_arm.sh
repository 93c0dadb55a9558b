#!/usr/bin/env bash
# Runs the tests of the offline part on 64-bit ARM: tools/test_on_arm.sh [PYTEST ARGUMENTS]
#
# The processor is emulated by qemu-user. Debian's Python for arm64 is unpacked into a directory of its own, and beside
# it the wheels for arm64 of what the package depends on: nothing is installed on this machine.
# Exit status 77: no Debian, or qemu-user-static is not installed. $STATEXCHANGE_ARM names a directory to keep for the
# next run, in place of a temporary one.
#
# What an emulated processor cannot show: the order in which one core sees another's stores, which is this machine's.
set -euo pipefail
cd "$(dirname "$0")/.."
emulator=$(command -v qemu-aarch64-static || true)
[ -n "$emulator" ] || { echo "qemu-user-static is not installed" >&2; exit 77; }
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || { echo "this is no Debian" >&2; exit 77; }
work=${STATEXCHANGE_ARM:-}
[ -n "$work" ] || { work=$(mktemp -d) && trap 'rm -rf "$work"' EXIT; }
root=$work/root site=$work/site bin=$work/bin

unpack_python() { # apt with lists and a status of its own, of an empty arm64 system
    mkdir -p "$work"/{lists/partial,archives/partial,status}
    : >"$work/status/status"
    local apt=(
        -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o APT::Install-Recommends=false -o Debug::NoLocking=1
        -o Dir::State::lists="$work/lists" -o Dir::State::status="$work/status/status"
        -o Dir::Cache::archives="$work/archives" -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache=
    )
    apt-get "${apt[@]}" update -qq 2>/dev/null || true # lists of other sources may have nothing for arm64
    apt-get "${apt[@]}" install -qq -y --download-only python3 libpython3-stdlib libstdc++6 >/dev/null
    mkdir "$root"
    local package
    for package in "$work"/archives/*.deb; do
        dpkg-deb -x "$package" "$root"
    done
    rm -r "$work/archives" "$work/lists"
}

[ -d "$root" ] || unpack_python
program=$(echo "$root"/usr/bin/python3.[0-9]*)
version=${program##*python}
# The emulator gives Python the wrapper's name, so that `sys.executable`, with which tests start processes, is the wrapper.
mkdir -p "$bin"
cat >"$bin/python" <<END
#!/bin/sh
export PYTHONHOME=$root/usr PYTHONPATH=$PWD:$site\${PYTHONPATH:+:\$PYTHONPATH}
exec $emulator -L $root -0 $bin/python $program "\$@"
END
chmod +x "$bin/python"
if [ ! -d "$site" ]; then
    platforms=()
    for glibc in 17 27 28 34; do
        platforms+=(--platform "manylinux_2_${glibc}_aarch64")
    done
    python3 -m pip install -qq --no-compile -c tools/constraints.txt --target "$site" --only-binary=:all: \
        --platform manylinux2014_aarch64 "${platforms[@]}" --python-version "$version" --implementation cp \
        click filelock fsspec ml_dtypes numpy safetensors xxhash zstandard \
        pytest pytest-timeout pytest-xdist hypothesis jsonschema
fi
"$bin/python" -c 'import numpy, platform; print(f"Python {platform.python_version()} on {platform.machine()}, numpy {numpy.__version__}")'
tests=(
    tests/unit/test_cli.py tests/unit/test_cli_errors.py tests/unit/test_cli_failures.py tests/unit/test_cli_merge.py
    tests/unit/test_flat_runs.py tests/unit/test_regions.py tests/unit/test_show*.py tests/unit/test_small_files.py
    tests/unit/test_version_0_1.py tests/unit/test_without_linux.py tests/unit/test_workspace*.py
)
# There is no torch. qemu keeps what is made below /proc, and tells a process another start time of itself than others
# read, so that tests of processes which find each other killed cannot be run.
left_out="not before_torch and not another_package and not without_configs and not read_only_directory and not dead_publisher"
"$bin/python" -m pytest -p no:cacheprovider -n 2 --timeout 600 -k "$left_out" "${tests[@]}" "$@"
