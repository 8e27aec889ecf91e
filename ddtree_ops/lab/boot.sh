#!/bin/sh
# One lab host, from power on to power off. Runs as root in a mount namespace of its own, which the kernel takes
# apart (overlay, disk, loop device) when the last process of the host is gone, however it went.
#   boot.sh NAME NETNS CGROUP IMAGE DIR BASE
# CGROUP is the host's control group below the root of the cgroup2 tree; DIR holds disk/, root/ and seed/.
set -eu
name=$1 netns=$2 cgroup=$3 image=$4 dir=$5 base=$6

echo "$$ $(cut -d' ' -f22 /proc/$$/stat)" >"$dir/supervisor.new"
mv "$dir/supervisor.new" "$dir/supervisor"

mount -o loop,noinit_itable,noatime "$image" "$dir/disk"
if ! [ -e "$dir/disk/upper/etc/hostname" ]; then
  cp -a "$dir/seed/." "$dir/disk/upper/"
  sync -f "$dir/disk" # a power cut loses what was not synced, and this is not the host's to lose
fi
mount -t overlay overlay -o "lowerdir=$base,upperdir=$dir/disk/upper,workdir=$dir/disk/work" "$dir/root"

# systemd-nspawn looks here to learn which kind of control groups to give the host
umount -R /sys/fs/cgroup 2>/dev/null || true
mount -t cgroup2 none /sys/fs/cgroup

# systemd-nspawn keeps a folder by machine name here and empties it at each boot; hosts of other labs share our name
mkdir -p /run/systemd/nspawn
mount -t tmpfs -o mode=755 none /run/systemd/nspawn

turn=0
while [ "$turn" -lt 50 ]; do
  turn=$((turn + 1)) rc=0
  sh -c 'echo $$ >"/sys/fs/cgroup/$1/cgroup.procs" && shift && exec "$@"' sh "$cgroup" \
    systemd-nspawn -q -D "$dir/root" -M "$name" -b --register=no --keep-unit \
    --kill-signal=SIGRTMIN+3 --network-namespace-path="/run/netns/$netns" --console=pipe \
    --link-journal=no --resolv-conf=off --timezone=off || rc=$?
  echo "boot $turn ended with $rc"
  # 133: the host asked for a reboot; 129 is the same seen through a signal. Anything else is power off.
  case $rc in 129 | 133) ;; *) exit "$rc" ;; esac
done
