#!/usr/bin/env bash
# The whole suite: unit tests over the cores, what needs quiet by itself, then real runs and daemons in two lanes.
set -uo pipefail
cd "$(dirname "$0")/.."
cores=$(nproc)
status=0
python -m pytest -q -n "$cores" --dist worksteal --ignore tests/system --ignore tests/e2e -m "not serial" "$@" || status=$?
python -m pytest -q --ignore tests/system --ignore tests/e2e -m "serial" "$@" || { s=$?; [ "$s" = 5 ] || status=$s; }
python -m pytest -q -n 2 --dist loadgroup tests/e2e tests/system "$@" || { s=$?; [ "$s" = 5 ] || status=$s; }
exit "$status"
