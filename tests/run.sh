#!/usr/bin/env bash
# The whole suite: unit tests over the cores, what needs quiet by itself, then real runs beside the real Slurm, which
# mostly waits. Each part ends with its closing line.
set -uo pipefail
cd "$(dirname "$0")/.."
status=0
part() {
  local code=0
  python -m pytest -q "$@" || code=$?
  [ "$code" = 5 ] && code=0      # options that leave a part without tests
  return "$code"
}
slurm=$(mktemp)
trap 'rm -f "$slurm"' EXIT
part -n "$(nproc)" --dist worksteal --ignore tests/system --ignore tests/e2e -m "not serial" "$@" || status=$?
part --ignore tests/system --ignore tests/e2e -m serial "$@" || status=$?
set -m      # else the part behind would never hear of Ctrl-C, and its Slurm would stay
part tests/system/test_slurm_*.py "$@" > "$slurm" 2>&1 < /dev/null &
behind=$!
set +m
trap 'kill -INT -- "-$behind" 2> /dev/null; wait "$behind"; exit 130' INT TERM
part tests/e2e tests/system --ignore-glob '*/test_slurm_*' "$@" || status=$?
wait "$behind" || status=$?
cat "$slurm"
exit "$status"
