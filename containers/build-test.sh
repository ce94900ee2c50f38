#!/bin/bash
# build-test.sh OUT.sif: a small image for the tests, made of this machine's shell, core tools and C library (no download,
# no %post, which some sandboxes forbid). The tests bind this machine's Python and its virtual environment into it.
set -euo pipefail
OUT=$(realpath -m "${1:?usage: build-test.sh OUT.sif}")
ROOT=$(mktemp -d); trap 'rm -rf "$ROOT"' EXIT
mkdir -p "$ROOT"/{usr/bin,usr/lib,usr/lib64,usr/sbin,etc,proc,sys,dev,tmp,run,var/tmp,root,home,mnt,opt,srv,work}
for link in bin lib lib64 sbin; do ln -s usr/$link "$ROOT/$link"; done
tools="bash sh env cat ls sed grep mkdir rm cp mv ln sleep date id uname hostname dirname basename readlink realpath
       head tail sort tr wc stat touch chmod df kill true false timeout mktemp ldconfig which"
for tool in $tools; do
  path=$(command -v "$tool" || ls /sbin/"$tool" 2>/dev/null) || continue
  case $path in /*) ;; *) path=/usr/bin/$tool ;; esac
  cp -L "$path" "$ROOT/usr/bin/$tool"
  ldd "$path" 2>/dev/null | grep -o '/[^ ]*' || true
done | sort -u | while read -r lib; do mkdir -p "$ROOT$(dirname "$lib")"; cp -L "$lib" "$ROOT$lib"; done
# Libraries that Python's own modules load later. The list is read whole first: a reader that leaves early ends its writer.
known=$(ldconfig -p)
for lib in libstdc++.so.6 libgcc_s.so.1 libgomp.so.1 libz.so.1 libbz2.so.1.0 liblzma.so.5 libffi.so.8 libssl.so.3 libcrypto.so.3 \
           libsqlite3.so.0 libreadline.so.8 libtinfo.so.6 libncursesw.so.6 libuuid.so.1 libm.so.6 librt.so.1 libdl.so.2 \
           libpthread.so.0 libutil.so.1 libresolv.so.2 libnss_files.so.2 libnss_dns.so.2 libcrypt.so.1 libexpat.so.1; do
  path=$(awk -v n="$lib" '$1 == n {print $NF; exit}' <<< "$known"); [ -n "$path" ] || continue
  mkdir -p "$ROOT/usr/lib/x86_64-linux-gnu"; cp -L "$path" "$ROOT/usr/lib/x86_64-linux-gnu/"
done
printf 'root:x:0:0:root:/root:/bin/bash\n' > "$ROOT/etc/passwd"; printf 'root:x:0:\n' > "$ROOT/etc/group"
printf 'hosts: files dns\n' > "$ROOT/etc/nsswitch.conf"; touch "$ROOT"/etc/{resolv.conf,hosts,localtime}
TMP_OUT=$(dirname "$OUT")/.$(basename "$OUT").new
apptainer --quiet build --force --mksquashfs-args "-comp gzip -Xcompression-level 1" "$TMP_OUT" "$ROOT"
mv "$TMP_OUT" "$OUT"
