#!/bin/bash
# First process of the NFS server: /dev/ubda is the exported disk, /dev/ubdb a small one.
. "$LAB_GUEST/common.sh"
load_module nfsd
mount -t nfsd nfsd /proc/fs/nfsd
mkdir -p /run/export
mount -t ext4 /dev/ubda /run/export || log "no disk"
for f in etab rmtab xtab; do : > /var/lib/nfs/$f; done
rpcbind -w
rpc.mountd --manage-gids 2> /dev/null || log "mountd failed"
rpc.statd --no-notify 2> /dev/null
cd /run/export && mkdir -p ws squash allsquash small && chmod 777 . ws squash allsquash && cd /
OPTIONS=rw,insecure,no_subtree_check,sync
exportfs -o $OPTIONS,no_root_squash,fsid=0,crossmnt "*:/run/export"
exportfs -o $OPTIONS,root_squash,fsid=11 "*:/run/export/squash"
exportfs -o $OPTIONS,all_squash,fsid=12 "*:/run/export/allsquash"
if mount -t ext4 /dev/ubdb /run/export/small; then
  chmod 777 /run/export/small
  exportfs -o $OPTIONS,no_root_squash,fsid=13 "*:/run/export/small"
fi
echo 10 > /proc/fs/nfsd/nfsv4leasetime
echo 10 > /proc/fs/nfsd/nfsv4gracetime
rpc.nfsd 4
# After a first boot there is no lock to reclaim. After a power cut (LAB_GRACE=1) clients need the grace period.
[ -n "$LAB_GRACE" ] || echo Y > /proc/fs/nfsd/v4_end_grace
exportfs -v >> "/run/out/$LAB_NAME.log"
serve
