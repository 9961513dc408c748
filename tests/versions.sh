#!/usr/bin/env bash
# Runs a smaller suite with other versions of torch and Lightning, each in an environment of its own:
#
#   tests/versions.sh                              the oldest and the newest that pyproject.toml accepts
#   tests/versions.sh newest                       one of them
#   tests/versions.sh torch==2.14.1                what pip is given; several words are several environments
#   tests/versions.sh "torch==2.12.1 lightning==2.6.4"
#
# Environments are kept in LIGHTNING_ZERO_VERSIONS, else in .venv-versions: each takes about 7 GB with the CUDA build of
# torch, 2 GB with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu. Arguments of pytest after --.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# What depends on torch and Lightning most: private names, tensor subclasses, hooks, formats, loops.
suite=(
  tests/repository/test_compat.py
  tests/tensors
  tests/core/test_order.py tests/engine/test_core_programs.py tests/core/test_activation_checkpointing.py
  tests/engine/test_engine_loop.py tests/engine/test_compile.py
  tests/optim/test_full_tensors.py tests/optim/test_probe.py tests/optim/test_optimizer_states.py
  tests/checkpoint/test_dcp.py tests/checkpoint/test_formats.py tests/checkpoint/test_full.py
  tests/construction tests/planner tests/record
  tests/strategy/test_parity.py tests/strategy/test_precision.py tests/strategy/test_averages.py
  tests/strategy/test_callbacks.py tests/strategy/test_batch_boundary.py tests/strategy/test_requeue.py
)

# The lowest version that pyproject.toml accepts of a package.
lowest() { sed -nE "s/^  \"$1>=([0-9.]+).*/$1==\1/p" pyproject.toml; }

wanted=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
  wanted+=("$1")
  shift
done
[ "${1:-}" != -- ] || shift
[ ${#wanted[@]} -gt 0 ] || wanted=(oldest newest)

root=${LIGHTNING_ZERO_VERSIONS:-$PWD/.venv-versions}
export OMP_NUM_THREADS=1
failed=()
for name in "${wanted[@]}"; do
  case $name in
    oldest) versions=("$(lowest torch)" "$(lowest lightning)") ;;
    newest) versions=(torch lightning) ;;
    *) read -ra versions <<< "$name" ;;
  esac
  python=$root/${name// /,}/bin/python
  [ -x "$python" ] || python3 -m venv "$root/${name// /,}"
  "$python" -m pip install --quiet --upgrade --upgrade-strategy only-if-needed -e ".[test]" "${versions[@]}"
  echo "== $name: $("$python" -c 'import lightning, sys, torch
print(f"torch {torch.__version__}, Lightning {lightning.__version__}, Python {sys.version.split()[0]}")')"
  "$python" -m pytest -q -n auto -m "not slow" "${suite[@]}" "$@" || failed+=("$name")
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
