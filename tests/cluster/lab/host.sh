#!/bin/bash
# PID 1 of a virtual host: makes its private parts of the file system, starts its daemons, then reaps orphans.
# Killing it is a power cut: the kernel ends all processes of a PID namespace together with its first.
#
#   host.sh FOLDER NAME login|node     with PRIVATE, SHARED and ENFORCE_MEMORY in the environment
folder=$1 name=$2 role=$3
hostname "$name"
mount --make-rprivate /
mount --bind "$folder/etc/hosts" /etc/hosts
mkdir -p /etc/slurm /run/munge
mount --bind "$folder/etc" /etc/slurm
mount -t tmpfs -o mode=755 tmpfs /run/munge
mount -t tmpfs -o mode=1777 tmpfs /dev/shm

# The kernel is one, and its id of this boot tells machines apart.
cat /proc/sys/kernel/random/uuid > "$folder/local/$name.boot_id"
mount --bind "$folder/local/$name.boot_id" /proc/sys/kernel/random/boot_id

# With one /tmp for all, `srun --mpi=pmix` fails on more than one host: their daemons make the same folder there.
for private in $PRIVATE; do
  mkdir -p "$folder/local/$name$private"
  chmod 1777 "$folder/local/$name$private"
done
for shared in $SHARED; do
  mkdir -p "$folder/local/$name$shared"
  mount --rbind "$shared" "$folder/local/$name$shared"
done
for private in $PRIVATE; do
  mount --rbind "$folder/local/$name$private" "$private"
done

# `ip netns exec` has mounted a /sys of this network, without the cgroups.
if [ -n "$ENFORCE_MEMORY" ]; then
  mount -t tmpfs tmpfs /sys/fs/cgroup
  for controller in freezer memory cpuset devices; do
    mkdir "/sys/fs/cgroup/$controller"
    mount -t cgroup -o "$controller" cgroup "/sys/fs/cgroup/$controller"
  done
fi

# One munged per host, its key owned by the user that runs it.
munged --force --key-file="$folder/etc/munge.key" --num-threads=2 --socket=/run/munge/munge.socket.2 \
  --pid-file=/run/munge/munged.pid --log-file=/run/munge/munged.log --seed-file=/run/munge/munged.seed
case $role in
  login) slurmctld ;;
  node) slurmd ;;
esac

trap : CHLD
while :; do sleep 3600 & wait $!; done
