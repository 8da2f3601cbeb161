#!/bin/bash
# All that one NVIDIA GPU can tell, in eight minutes: `bash benchmarks/gpu.sh OUT`. Logs go to OUT, as do the tables.
# The machine may have no network: wheels that it lacks are taken from .whl/, if that is there.
set -u
out=${1:?the folder for the logs}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=4
if compgen -G '.whl/*.whl' >/dev/null; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target .site .whl/*.whl || exit 1
fi
# Commands that the tests start take their path from the first of these.
export LOCKSTEP_TEST_SOURCE=$PWD/src:$PWD/.site PYTHONPATH=$PWD:$PWD/src:$PWD/.site
part() { # NAME LIMIT_S COMMAND…
    local name=$1 limit_s=$2 begin_s=$SECONDS
    shift 2
    timeout -k 5 "$limit_s" "$@" >"$out/$name.log" 2>&1
    echo "== $name: exit code $?, $((SECONDS - begin_s)) s"
    tail -n 40 "$out/$name.log"
}
nvidia-smi --query-gpu=name,driver_version,mig.mode.current,pcie.link.gen.current --format=csv,noheader
part findings 170 python3 -m benchmarks.jobs.on_gpu
part tests 200 python3 -m pytest tests/gpu -n 5 -p no:cacheprovider --timeout 90 -rfE --tb=line -k "not hangs and not compared and not forecast"
part resnet18 110 python3 -m benchmarks.gpu --only resnet18
cp benchmarks/results/gpu-*.md "$out"/ 2>/dev/null
exit 0
