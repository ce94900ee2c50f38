#!/usr/bin/env bash
# The whole suite: unit tests over the cores, then what needs real daemons or quiet, one at a time. One closing line each.
set -uo pipefail
cd "$(dirname "$0")/.."
cores=$(nproc)
status=0
python -m pytest -q -n "$cores" --dist worksteal --ignore tests/system --ignore tests/e2e -m "not serial" "$@" || status=$?
python -m pytest -q --ignore tests/system --ignore tests/e2e -m "serial" "$@" || { s=$?; [ "$s" = 5 ] || status=$s; }
python -m pytest -q tests/e2e tests/system "$@" || { s=$?; [ "$s" = 5 ] || status=$s; }
exit "$status"
