#!/usr/bin/env bash
# What is tried first on one GPU: tests/gpu/run.sh [PIECE...]
#
# Pieces are smoke, tests and check, each at most nine minutes, the most telling first; without any,
# all of them. A piece that runs out of time prints the failures so far. What they find is in $OUT
# (outputs/gpu if it is not set).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OUT=${OUT:-outputs/gpu} OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
[ $# -gt 0 ] || set -- smoke check tests
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
    timeout -s INT 540 python -m lightning_zero "$piece" --out "$OUT" || echo "$piece failed or timed out"
  fi
done
