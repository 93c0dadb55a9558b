"""A kernel NFS server and two kernel NFS clients on one machine, and the checks of statexchange that need them."""
