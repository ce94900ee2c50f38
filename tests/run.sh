#!/usr/bin/env bash
# The whole suite: unit tests over the cores, then real runs in two lanes, the real Slurm and vLLM, which use less than a
# core, behind. Each part ends with its closing line.
set -uo pipefail
cd "$(dirname "$0")/.."
status=0
part() {
  local code=0
  python -m pytest -q "$@" || code=$?
  [ "$code" = 5 ] && code=0      # options that leave a part without tests
  return "$code"
}
behind_says=$(mktemp)
own=$(mktemp -d)                 # DeepSpeed compiles once for all parts, and no killed build of another session is in the way
export TORCH_EXTENSIONS_DIR="$own"
trap 'rm -rf "$behind_says" "$own"' EXIT
part -n "$(nproc)" --dist worksteal --ignore tests/system --ignore tests/e2e "$@" || status=$?
set -m      # else the part behind would never hear of Ctrl-C, and its daemons would stay
part tests/system/test_slurm_*.py tests/system/test_vllm*.py "$@" > "$behind_says" 2>&1 < /dev/null &
behind=$!
set +m
trap 'kill -INT -- "-$behind" 2> /dev/null; wait "$behind"; exit 130' INT TERM
part tests/e2e tests/system --ignore-glob '*/test_slurm_*' --ignore-glob '*/test_vllm*' "$@" || status=$?
wait "$behind" || status=$?
cat "$behind_says"
exit "$status"
