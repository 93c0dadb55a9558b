"""The cluster: a controller and two hosts, as the first process of namespaces of its own.

`python cluster.py WORKDIR PACKAGES COMMAND...` expects to be process 1 of a new mount, network, UTS and pid namespace.
The machine's own files, network and processes do not change: Slurm's files are overlaid on /usr in the mount namespace,
since the path of slurmstepd is compiled in, and each host has a network, a name and a /dev/shm of its own.
When this process ends, for whatever reason, the kernel ends all others and drops the namespaces.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

LOGIN = "login"
HOSTS = ("node001", "node002")
NETWORK = "10.97.0"
START_S = 60.0
FAILED = 3
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={login}({network}.1)
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
SwitchType=switch/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmUser=root
SlurmdUser=root
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={workdir}/state
SlurmdSpoolDir={workdir}/spool-%n
SlurmctldPidFile={workdir}/slurmctld.pid
SlurmdPidFile={workdir}/slurmd-%n.pid
SlurmctldLogFile={workdir}/slurmctld.log
SlurmdLogFile={workdir}/slurmd-%n.log
{nodes}
PartitionName=lab Nodes={hosts} Default=YES MaxTime=INFINITE State=UP
"""
# A host waits for "go on", which is written to it once its end of the veth cable exists.
HOST = """
set -e
hostname "$1"
mount -t tmpfs -o size=1g shm /dev/shm
echo ready
read -r _
ip link set lo up
ip addr add "$2/24" dev eth0
ip link set eth0 up
exec slurmd-wlm -D -N "$1"
"""


class LabError(Exception):
    """The cluster did not start."""


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: exit status {done.returncode}: {done.stderr[-400:]}")


def _set_up(workdir: str, packages: str) -> None:
    """Make this the login host: mount Slurm's files, write its configuration, set up the network."""
    _run("mount", "--make-rprivate", "/")
    _run("mount", "-t", "overlay", "-o", f"lowerdir=/usr:{packages}/root/usr", "slurm", "/usr")
    addresses = {LOGIN: f"{NETWORK}.1", **{host: f"{NETWORK}.{2 + i}" for i, host in enumerate(HOSTS)}}
    with open(f"{workdir}/hosts", "w", encoding="ascii") as file:
        file.write("127.0.0.1 localhost\n")
        file.writelines(f"{address} {name}\n" for name, address in addresses.items())
    _run("mount", "--bind", f"{workdir}/hosts", "/etc/hosts")
    nodes = [f"NodeName={host} NodeAddr={addresses[host]} CPUs=4 State=UNKNOWN" for host in HOSTS]
    os.makedirs(f"{workdir}/state")
    with open(f"{workdir}/slurm.conf", "w", encoding="ascii") as file:
        file.write(
            CONFIGURATION.format(
                login=LOGIN, network=NETWORK, workdir=workdir, nodes="\n".join(nodes), hosts=",".join(HOSTS)
            )
        )
    os.environ["SLURM_CONF"] = f"{workdir}/slurm.conf"
    _run("hostname", LOGIN)
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", "br0", "type", "bridge")
    _run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", "br0")
    _run("ip", "link", "set", "br0", "up")


def _start_host(number: int, host: str, workdir: str) -> None:
    words = ["unshare", "--mount", "--net", "--uts", "sh", "-c", HOST, "sh", host, f"{NETWORK}.{2 + number}"]
    with open(f"{workdir}/{host}.out", "wb") as log:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    assert process.stdin is not None
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        raise LabError(f"the host {host} did not start: see {workdir}/{host}.out")
    cable = f"cable{number}"
    _run("ip", "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid))
    _run("ip", "link", "set", cable, "master", "br0", "up")
    process.stdin.write(b"go on\n")
    process.stdin.close()


def _wait_until_idle() -> None:
    deadline = time.monotonic() + START_S
    state = ""
    while state.split() != ["idle"] * len(HOSTS):
        if time.monotonic() > deadline:
            raise LabError(f"the hosts are not ready after {START_S:g} s: {state.split()}")
        done = subprocess.run(["sinfo", "-h", "-N", "-o", "%T"], capture_output=True, text=True, check=False)
        state = done.stdout
        time.sleep(0.1)


def main() -> int:
    """Start the cluster, run a command on its login host, and return the command's exit status."""
    workdir, packages, *command = sys.argv[1:]
    try:
        _set_up(workdir, packages)
        with open(f"{workdir}/controller.out", "wb") as log:
            subprocess.Popen(["slurmctld-wlm", "-D"], stdout=log, stderr=log)
        for number, host in enumerate(HOSTS):
            _start_host(number, host, workdir)
        _wait_until_idle()
    except LabError as error:
        print(f"the Slurm lab failed: {error}", file=sys.stderr)
        return FAILED
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
