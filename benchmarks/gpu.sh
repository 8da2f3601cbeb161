#!/bin/bash
# All that one NVIDIA GPU can tell, in eight minutes, the most in the first two: `bash benchmarks/gpu.sh OUT [--cpu]`.
# Logs go to OUT, as do the tables. The machine may have no network: wheels that it lacks are taken from .whl/, if that
# is there. CIFAR-10 is read from LOCKSTEP_TEST_DATA or shared/data, if it is there. `--cpu` rehearses on a processor.
set -u
out=${1:?the folder for the logs}
cpu=${2:-}
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=4
if compgen -G '.whl/*.whl' >/dev/null; then
    python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --target .site .whl/*.whl || exit 1
fi
# Commands that the tests start take their path from the first of these.
export LOCKSTEP_TEST_SOURCE=$PWD/src:$PWD/.site PYTHONPATH=$PWD:$PWD/src:$PWD/.site
if [ -z "${LOCKSTEP_TEST_DATA:-}" ] && [ -d "$PWD/shared/data" ]; then
    export LOCKSTEP_TEST_DATA=$PWD/shared/data
fi
part() { # NAME LIMIT_S COMMAND…
    local name=$1 limit_s=$2 begin_s=$SECONDS
    shift 2
    timeout -k 5 "$limit_s" "$@" >"$out/$name.log" 2>&1
    echo "== $name: exit code $?, $((SECONDS - begin_s)) s"
    tail -n 40 "$out/$name.log"
    cp benchmarks/results/gpu-*.md "$out"/ 2>/dev/null
}
if [ "$cpu" = --cpu ]; then
    export LOCKSTEP_REHEARSAL=1 OMP_NUM_THREADS=1
else
    nvidia-smi --query-gpu=name,driver_version,mig.mode.current,pcie.link.gen.current --format=csv,noheader
fi
part steps 110 python3 -m benchmarks gpu --parts steps,costs $cpu
part speedrun 70 python3 -m benchmarks gpu --parts speedrun $cpu
part tests 140 python3 -m pytest tests/gpu -n 5 -p no:cacheprovider --timeout 90 -rfE --tb=line -k "not hangs and not compared and not forecast"
part ranks 80 python3 -m benchmarks.jobs.on_gpu $cpu
part loops 80 python3 -m benchmarks gpu --parts train,compiled $cpu
exit 0
