#!/usr/bin/env bash
# The whole suite: the unit tests on all cores, then the real runs. Those with Slurm and vLLM, which
# use less than a core, run in the background meanwhile; their output comes last.
set -uo pipefail
cd "$(dirname "$0")/.."
status=0
part() {
  local code=0
  python -m pytest -q "$@" || code=$?
  [ "$code" = 5 ] && code=0      # the options select no test of this part
  return "$code"
}
background_output=$(mktemp)
# DeepSpeed compiles once for all parts; the lock that a killed session left can't block it.
extensions=$(mktemp -d)
export TORCH_EXTENSIONS_DIR="$extensions"
trap 'rm -rf "$background_output" "$extensions"' EXIT
part -n "$(nproc)" --dist worksteal --ignore tests/system --ignore tests/e2e "$@" || status=$?
# Job control: without it the background part would ignore Ctrl-C, and its daemons would stay.
set -m
part tests/system/test_slurm_*.py tests/system/test_vllm*.py "$@" \
  > "$background_output" 2>&1 < /dev/null &
background=$!
set +m
trap 'kill -INT -- "-$background" 2> /dev/null; wait "$background"; exit 130' INT TERM
part tests/e2e tests/system --ignore-glob '*/test_slurm_*' --ignore-glob '*/test_vllm*' "$@" \
  || status=$?
wait "$background" || status=$?
cat "$background_output"
exit "$status"
