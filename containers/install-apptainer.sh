#!/bin/bash
# install-apptainer.sh [--if-possible]: Apptainer for the tests, on Debian, as root. Does nothing when it is there. With
# --if-possible a machine where it can't is told about and no error: the tests skip there.
# Debian 12 has no package of it, so it is taken from the distribution's own mirror of unstable and unpacked with private
# copies of the libraries it needs: the system's C library and apt sources stay as they are.
set -euo pipefail
if ! command -v apptainer >/dev/null 2>&1; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no Apptainer here, and only root on Debian can install it this way" >&2
    [ "${1:-}" = --if-possible ]; exit
  fi
  export DEBIAN_FRONTEND=noninteractive
  P=/opt/apptainer-sid; W=$(mktemp -d); trap 'rm -rf "$W"' EXIT; chmod 755 "$W"
  apt-get update -qq
  apt-get install -y -qq --no-install-recommends patchelf squashfs-tools uidmap fakeroot squashfuse fuse-overlayfs \
    ca-certificates >/dev/null
  mkdir -p "$W"/lists/partial "$W"/deb "$W"/x "$P"/lib
  MIRROR=$(apt-get indextargets --format '$(REPO_URI)' 'Identifier: Packages' | grep -v security | head -1)
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $MIRROR sid main" > "$W"/sid.list
  A=(-o Dir::Etc::sourcelist="$W"/sid.list -o Dir::Etc::sourceparts=/dev/null -o Dir::State::lists="$W"/lists
     -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
  apt-get "${A[@]}" update -qq
  (cd "$W"/deb && apt-get "${A[@]}" download -qq apptainer libc6 libseccomp2 libsqlite3-0)
  for deb in "$W"/deb/*.deb; do name=$(basename "$deb"); dpkg-deb -x "$deb" "$W"/x/${name%%_*}; done
  find "$W"/x/libc6 -path '*x86_64-linux-gnu/*' -maxdepth 4 -name '*.so*' -exec cp -a {} "$P"/lib/ \;
  cp -a "$W"/x/libseccomp2/usr/lib/x86_64-linux-gnu/*.so* "$W"/x/libsqlite3-0/usr/lib/x86_64-linux-gnu/*.so* "$P"/lib/
  X=$W/x/apptainer
  for b in "$X"/usr/bin/apptainer "$X"/usr/lib/x86_64-linux-gnu/apptainer/bin/starter; do
    patchelf --force-rpath --set-interpreter "$P"/lib/ld-linux-x86-64.so.2 --set-rpath "$P"/lib "$b"
  done
  cp -a "$X"/usr/lib/x86_64-linux-gnu/apptainer /usr/lib/x86_64-linux-gnu/
  cp -a "$X"/etc/apptainer /etc/; cp -a "$X"/var/lib/apptainer /var/lib/
  install -m755 "$X"/usr/bin/apptainer /usr/bin/apptainer   # its config is looked up beside the binary, in ../etc
fi
# A sandbox may lack one of root's capabilities; Apptainer asks for all of them unless told which there are.
if [ "$(id -u)" = 0 ] && ! capsh --print 2>/dev/null | grep -q '^Current: =ep$'; then
  sed -i 's/^root default capabilities.*/root default capabilities = file/' /etc/apptainer/apptainer.conf
  apptainer capability add --user root CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_DAC_READ_SEARCH,CAP_FOWNER,CAP_FSETID,CAP_KILL,\
CAP_SETGID,CAP_SETUID,CAP_SETPCAP,CAP_SYS_CHROOT,CAP_MKNOD,CAP_AUDIT_WRITE,CAP_SETFCAP,CAP_SYS_PTRACE,\
CAP_NET_BIND_SERVICE,CAP_SYS_ADMIN >/dev/null 2>&1
fi
apptainer --version
