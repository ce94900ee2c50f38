#!/bin/bash
# up.sh [LAB] [NODES=4] [BASEPORT=27800]: a real Slurm on this machine, everything it writes under LAB.
# Several labs run side by side when their folders and ports differ. Needs root and what install.sh installs.
# Afterwards: export SLURM_CONF=LAB/conf/slurm.conf
set -euo pipefail
LAB=$(realpath -m "${1:-/tmp/plimsoll-cluster}"); N=${2:-4}; BP=${3:-27800}
HERE=$(cd "$(dirname "$0")" && pwd)
export PATH=$PATH:/usr/sbin:/sbin SLURM_CONF=$LAB/conf/slurm.conf
[ "$(id -u)" = 0 ] || { echo "up.sh starts daemons as root; run it as root, or use hydra/launcher=local" >&2; exit 1; }
mkdir -p "$LAB"/{log,state,spool,pid,munge,conf,dev,mysql,mysqlrun}; chmod 755 "$LAB" "$LAB"/munge
trap 'echo "up.sh failed in line $LINENO; see $LAB/log" >&2; tail -n 3 "$LAB"/log/*install* >&2 2>/dev/null' ERR
say() { printf '[%3ds] %s\n' "$SECONDS" "$*"; }
wait_for() { local what=$1 tries=$2; shift 2; for _ in $(seq "$tries"); do "$@" >/dev/null 2>&1 && return; sleep .1; done
  echo "$what did not come up; see $LAB/log" >&2; exit 1; }
port_open() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

[ -s "$LAB"/munge/key ] || (umask 077; head -c 128 /dev/urandom > "$LAB"/munge/key)
munged --force --key-file="$LAB"/munge/key --socket="$LAB"/munge/sock --pid-file="$LAB"/pid/munged.pid \
  --log-file="$LAB"/log/munged.log --seed-file="$LAB"/munge/seed
# Fake GPUs: clones of the null device. Slurm counts device files; Count= without File= gives none.
for g in 0 1; do [ -c "$LAB"/dev/nvidia$g ] || mknod "$LAB"/dev/nvidia$g c 1 3; done
for f in slurm gres slurmdbd; do
  sed -e "s|@LAB@|$LAB|g; s|@HOST@|$(hostname -s)|g; s|@N@|$N|g; s|@CTLD@|$BP|g; s|@DBD@|$((BP+1))|g" \
      -e "s|@P1@|$((BP+11))|g; s|@PN@|$((BP+10+N))|g" "$HERE"/$f.conf.in > "$LAB"/conf/$f.conf
done
chmod 600 "$LAB"/conf/slurmdbd.conf; cp "$HERE"/cgroup.conf "$LAB"/conf/

if [ ! -d "$LAB"/mysql/mysql ]; then
  chown mysql: "$LAB"/mysql "$LAB"/mysqlrun
  mariadb-install-db --no-defaults --user=mysql --datadir="$LAB"/mysql --skip-test-db \
    --auth-root-authentication-method=socket > "$LAB"/log/mysql_install.log 2>&1
fi
mariadbd --no-defaults --user=mysql --datadir="$LAB"/mysql --socket="$LAB"/mysqlrun/sock --pid-file="$LAB"/mysqlrun/mariadbd.pid \
  --skip-networking --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 --innodb-flush-log-at-trx-commit=2 \
  > "$LAB"/log/mariadbd.log 2>&1 < /dev/null & echo $! > "$LAB"/pid/mariadbd.pid
wait_for MariaDB 1500 mariadb-admin --no-defaults -S "$LAB"/mysqlrun/sock ping
mariadb --no-defaults -S "$LAB"/mysqlrun/sock -e "create database if not exists slurm_acct_db;
  create user if not exists slurm@localhost identified by 'x'; grant all on slurm_acct_db.* to slurm@localhost;"
MYSQL_UNIX_PORT=$LAB/mysqlrun/sock slurmdbd -D > "$LAB"/log/slurmdbd.out 2>&1 < /dev/null & echo $! > "$LAB"/pid/slurmdbd.pid
wait_for slurmdbd 1500 port_open $((BP+1))
timeout 200 sacctmgr -i add cluster dev > "$LAB"/log/sacctmgr.out 2>&1 || true   # fails when it is there already
slurmctld -D > "$LAB"/log/slurmctld.out 2>&1 < /dev/null & echo $! > "$LAB"/pid/slurmctld.pid
for i in $(seq "$N"); do
  slurmd -D -N "n$i" > "$LAB"/log/slurmd-n$i.out 2>&1 < /dev/null & echo $! > "$LAB"/pid/slurmd-n$i.pid
done
all_idle() { [ "$(timeout 20 sinfo -h -p low -t idle -o %D | head -1)" = "$N" ]; }
wait_for "The nodes" 1000 all_idle
say "$(timeout 5 sinfo -h -o '%P %D nodes %T' | tr '\n' ';') export SLURM_CONF=$SLURM_CONF"
