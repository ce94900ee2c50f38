#!/bin/bash
# build.sh [OUT.sif]: build the image of plimsoll.def, test it, print its digest. Needs Apptainer, the network, about 40 GB
# of disk, and either root or user namespaces (--fakeroot). APPTAINER_TMPDIR and APPTAINER_CACHEDIR should be large local disks.
# BASE_IMAGE names a mirror's copy of the base image.
set -euo pipefail
fail() { echo "build.sh: $*" >&2; exit 1; }
ROOT=$(cd "$(dirname "$0")/.." && pwd); OUT=$(realpath -m "${1:-$ROOT/containers/plimsoll.sif}")
command -v apptainer >/dev/null || fail "there is no apptainer on PATH; see docs/containers.md"
mkdir -p "$(dirname "$OUT")" && [ -w "$(dirname "$OUT")" ] || fail "cannot write to $(dirname "$OUT")"
TMP=$(mktemp -d); trap 'rm -rf "$TMP" "$OUT.new"' EXIT
base=${BASE_IMAGE:-$(sed -n 's/^From: //p' "$ROOT/containers/plimsoll.def")}
commit=$(git -C "$ROOT" rev-parse HEAD 2>/dev/null || echo unknown)
locked=$(sha256sum "$ROOT/requirements/cuda.txt" | cut -d' ' -f1)
sed -e "s|^From: .*|From: $base|; s/@COMMIT@/$commit/; s/@LOCKED@/sha256:$locked/" \
  "$ROOT/containers/plimsoll.def" > "$TMP/plimsoll.def"
flags=(--force); [ "$(id -u)" = 0 ] || flags+=(--fakeroot)
# The old image stays in place, for jobs that run in it, until the new one has passed %test.
if ! (cd "$ROOT" && apptainer build "${flags[@]}" --notest "$OUT.new" "$TMP/plimsoll.def") 2>&1 | tee "$TMP/log"; then
  why=$(sed -n 's/^FATAL: *//p' "$TMP/log" | tail -n 1)
  case $why in
    *'conveyor failed'*) fail "the base image $base cannot be fetched (${why##*: }). Build where its registry can be reached, \
set HTTPS_PROXY, or name a mirror's copy: BASE_IMAGE=REGISTRY/${base##*/} containers/build.sh" ;;
    *) fail "the build failed: ${why:-see above}. $OUT is as it was." ;;
  esac
fi
apptainer test --cleanenv "$OUT.new" || fail "the new image failed its %test, see above. $OUT is as it was."
mv "$OUT.new" "$OUT"
echo "container.image=$OUT container.digest=sha256:$(sha256sum "$OUT" | cut -d' ' -f1)"
