#!/usr/bin/env bash
# Brings together in .carry/, which git does not see, what a lent machine with a GPU and without network lacks:
# wheels for its Python 3.12, machine code of the kernels for Hopper and of the CPU's, and with `server` a
# tritonserver, of 45 MB: more than what may travel in one call, so .carry/server.tar.xz goes in one of its own.
# `there.sh` uses it.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=.venv/bin/python
grep -qx '/.carry/' .git/info/exclude || echo '/.carry/' >> .git/info/exclude
rm -rf .carry
mkdir -p .carry/wheels

fetch() {
    local platforms=()
    for number in 17 24 26 27 28 31 34 35; do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --abi cp312 --abi abi3 --abi none "${platforms[@]}" --platform manylinux2014_x86_64 -d "$@"
}

fetch .carry/wheels msgspec pyzmq gguf llguidance==1.9.1 transformers==5.23.0 tokenizers==0.23.3

cache=$(mktemp -d)
QUIRE_CACHE_DIR=$cache $python -m quire_kernels.cuda.compiler --arch sm_90a > /dev/null
mv "$cache/cuda" .carry/cubins
rm -r "$cache"
$python -c 'from pathlib import Path; from quire_kernels.cpu import compiler; list(compiler.prebuild(Path(".carry/prebuilt")))'

if [ "${1:-}" = server ]; then
    site=$(mktemp -d)
    packages=$($python -c 'import pytriton; print(list(pytriton.__path__)[0])')/..
    cp -r "$packages"/pytriton "$packages"/nvidia_pytriton* "$packages"/tritonclient "$site"
    find "$site"/pytriton/tritonserver/python_backend_stubs -mindepth 1 -maxdepth 1 ! -name 3.12 -exec rm -r {} +
    find "$site" -name __pycache__ -prune -exec rm -r {} +
    rm -rf "$site"/tritonclient/perf_analyzer*
    # Its stub reads BYTES wrongly with numpy 2.
    fetch "$site" numpy==1.26.4
    (cd "$site" && python3 -m zipfile -e numpy-*.whl . && rm numpy-*.whl)
    tar -C "$site" -cf - . | xz -T0 > .carry/server.tar.xz
    rm -r "$site"
fi
du -sh .carry
