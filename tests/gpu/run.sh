#!/usr/bin/env bash
# What a first hour on one GPU should tell: tests/gpu/run.sh [--dry] [PIECE...]
#
# Pieces are smoke, tests, memory, overhead, offload, largest and page, each at most nine minutes, the
# most telling first; without any, all of them. A piece that runs out of time prints the failures
# so far. What they find lies in $OUT (outputs/gpu if it is not set), page there makes a
# page for tests/benchmarks/. --dry runs tiny cases on the CPU, to see that this script works.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OUT=${OUT:-outputs/gpu} OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
dry=()
if [ "${1:-}" = --dry ]; then
  dry=(--dry)
  shift
fi
[ $# -gt 0 ] || set -- smoke tests memory overhead offload largest page
mkdir -p "$OUT"

for piece in "$@"; do
  echo "== $piece"
  if [ "$piece" = smoke ]; then # aborts of NCCL, forked workers, and every tier and stage with real values
    timeout -s INT 540 python -m pytest tests/gpu/test_abort.py tests/gpu/test_forks.py tests/gpu/test_parity.py -v --tb=short -p no:cacheprovider \
      2>&1 | tee "$OUT/smoke.txt" || echo "smoke failed or timed out"
  elif [ "$piece" = tests ]; then
    timeout -s INT 540 python -m pytest tests/gpu/test_delays.py tests/gpu -v --tb=short -p no:cacheprovider \
      --deselect tests/gpu/test_parity.py --deselect tests/gpu/test_forks.py --deselect tests/gpu/test_abort.py 2>&1 |
      tee "$OUT/tests.txt" || echo "tests failed or timed out"
  else
    timeout -s INT 540 python -m tests.gpu.first_hour "$piece" --out "$OUT" "${dry[@]}" ||
      echo "$piece failed or timed out"
  fi
done
