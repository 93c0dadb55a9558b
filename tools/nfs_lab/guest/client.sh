#!/bin/bash
# First process of an NFS client.
. "$LAB_GUEST/common.sh"
load_module nfsv4
load_module nfsv3
rpcbind -w
rpc.statd --no-notify 2> /dev/null
serve
