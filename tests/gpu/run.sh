#!/usr/bin/env bash
# What a first hour on one GPU should tell: tests/gpu/run.sh [--dry] [PIECE...]
#
# Pieces are tests, memory, overhead, offload, largest and page, each at most nine minutes; without
# any, all of them. What they find lies in $OUT (outputs/gpu if it is not set), page there makes a
# page for tests/benchmarks/. --dry runs tiny cases on the CPU, to see that this script works.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OUT=${OUT:-outputs/gpu} OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
dry=()
if [ "${1:-}" = --dry ]; then
  dry=(--dry)
  shift
fi
[ $# -gt 0 ] || set -- tests memory overhead offload largest page
mkdir -p "$OUT"

for piece in "$@"; do
  echo "== $piece"
  if [ "$piece" = tests ]; then
    timeout 540 python -m pytest tests/gpu tests/streams -q -p no:cacheprovider 2>&1 |
      tee "$OUT/tests.txt" || echo "tests failed or timed out"
  else
    timeout 540 python -m tests.gpu.first_hour "$piece" --out "$OUT" "${dry[@]}" ||
      echo "$piece failed or timed out"
  fi
done
