# Sourced by the first process of every host. Mounts the system directories, configures the network and defines
# `log TEXT`, `load_module NAME` and `serve` (run the commands that the driver leaves in the host's queue directory).
# From the kernel command line: LAB_OUT (shared with the driver), LAB_ROOT (unpacked packages), LAB_NAME, LAB_IP.
R=$LAB_ROOT
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:$R/sbin:$R/usr/sbin HOME=/run/tmp TMPDIR=/run/tmp
export LD_LIBRARY_PATH=$R/usr/lib/x86_64-linux-gnu:$R/lib/x86_64-linux-gnu
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -p /run/tmp /run/out /run/m
chmod 1777 /run/tmp
mount -t devtmpfs dev /dev 2>/dev/null
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
mount -t hostfs -o "$LAB_OUT" none /run/out
QUEUE=/run/out/$LAB_NAME
log() { echo "$(date +%s.%N | cut -c1-14) [$LAB_NAME] $*" >> "/run/out/$LAB_NAME.log"; }

ln -s "$R/bin/kmod" /run/modprobe
load_module() { /run/modprobe -d "$R/modtree" -S "$(uname -r)" "$@" || log "no module: $*"; }

[ -n "$LAB_SKEW_S" ] && date -s "@$(($(date +%s) + LAB_SKEW_S))" > /dev/null
hostname "$LAB_NAME"
ip link set lo up
ip addr add "$LAB_IP/24" dev eth0
ip link set eth0 up

# rpcbind and statd need users of their own and a writable /var/lib/nfs.
cp /etc/passwd /run/passwd
echo "_rpc:x:107:65534::/run/rpcbind:/usr/sbin/nologin" >> /run/passwd
echo "statd:x:108:65534::/var/lib/nfs:/usr/sbin/nologin" >> /run/passwd
mount --bind /run/passwd /etc/passwd
mount -t tmpfs tmpfs /var/lib
mkdir -p /var/lib/nfs/v4recovery /var/lib/nfs/sm /var/lib/nfs/sm.bak /run/sendsigs.omit.d

# lockd's grace period holds up NFSv4 locks too; its default is 50 s, and its length a multiple of nlm_timeout.
load_module lockd nlm_timeout=3 nlm_grace_period=3

# `read` on a pipe without writers is the wait: `sleep` would start a process, which is expensive in user-mode-linux.
mkfifo /run/nothing
serve() {
  exec 3<> /run/nothing
  log READY
  while :; do
    for command in "$QUEUE"/*.cmd; do
      [ -f "$command" ] || continue
      id=$(basename "$command" .cmd)
      mv "$command" "/run/tmp/$id.sh"
      ( sh "/run/tmp/$id.sh" > "$QUEUE/$id.txt" 2>&1
        echo $? > "$QUEUE/$id.status.new"
        mv "$QUEUE/$id.status.new" "$QUEUE/$id.status" ) 3>&- &
    done
    read -rt 0.1 -u 3
  done
}
