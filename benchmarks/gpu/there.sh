#!/usr/bin/env bash
# On the lent machine, in a copy of the working tree with .carry/ (see carry.sh): sets up, then runs a command.
#
#     bash benchmarks/gpu/there.sh python3 -m benchmarks.gpu.run_all --out "$OUT/gpu.json"
#     bash benchmarks/gpu/there.sh python3 -m quire.cli serve --model-repository model_repository
set -euo pipefail
site=/tmp/site
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 QUIRE_CACHE_DIR=/tmp/quire-cache
export PYTHONPATH=$site:backend:kernels:ensemble:common:client:.
if [ -d .carry/wheels ] && [ ! -d $site/msgspec ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target $site .carry/wheels/*.whl
    mkdir -p "$QUIRE_CACHE_DIR/cuda" kernels/quire_kernels/cpu/prebuilt
    cp .carry/cubins/* "$QUIRE_CACHE_DIR/cuda"
    chmod -R go-w "$QUIRE_CACHE_DIR"
    cp .carry/prebuilt/* kernels/quire_kernels/cpu/prebuilt
fi
if [ -f .carry/server.tar.xz ] && [ ! -d $site/pytriton ]; then
    mkdir -p $site
    tar -C $site -xf .carry/server.tar.xz
fi
exec "$@"
