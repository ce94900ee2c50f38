#!/bin/bash
# build.sh [OUT.sif]: build the image of plimsoll.def, test it, print its digest. Needs Apptainer, the network, about 40 GB
# of disk, and either root or user namespaces (--fakeroot). APPTAINER_TMPDIR and APPTAINER_CACHEDIR should be large local disks.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/.." && pwd); OUT=$(realpath -m "${1:-$ROOT/containers/plimsoll.sif}")
command -v apptainer >/dev/null || { echo "there is no apptainer here; see docs/containers.md" >&2; exit 1; }
TMP=$(mktemp -d); trap 'rm -rf "$TMP"' EXIT
commit=$(git -C "$ROOT" rev-parse HEAD 2>/dev/null || echo unknown)
locked=$(sha256sum "$ROOT/requirements/cuda.txt" | cut -d' ' -f1)
sed -e "s/@COMMIT@/$commit/; s/@LOCKED@/sha256:$locked/" "$ROOT/containers/plimsoll.def" > "$TMP/plimsoll.def"
flags=(); [ "$(id -u)" = 0 ] || flags=(--fakeroot)
# The old image stays in place, for jobs that run in it, until the new one has passed %test.
(cd "$ROOT" && apptainer build "${flags[@]}" "$OUT.new" "$TMP/plimsoll.def")
apptainer test --cleanenv "$OUT.new"
mv "$OUT.new" "$OUT"
echo "container.image=$OUT container.digest=sha256:$(sha256sum "$OUT" | cut -d' ' -f1)"
