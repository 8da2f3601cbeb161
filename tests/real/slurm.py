"""A real Slurm cluster on loopback: munge, a controller and two nodes, with ports and folders of their own."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..command import Running, until
from ..needs import need
from ..ports import free_port

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin", "/sbin"])
_PR_SET_PDEATHSIG = 1

# Each node claims to have four processors, whatever the machine has, and two GPUs. No part of the machine is changed:
# neither control groups nor accounts. Jobs of one partition have to make room for those of the other, in a minute.
_CONF = """\
ClusterName=lockstep
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=60
MinJobAge=300
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 Gres=gpu:2
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 Gres=gpu:2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=60 State=UP OverSubscribe=NO PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=n[1-2] MaxTime=60 State=UP OverSubscribe=NO PriorityTier=2 PreemptMode=OFF
"""
_LAST = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass(frozen=True)
class Cluster:
    """A cluster that runs, and the environment in which Slurm's commands find it."""

    env: dict[str, str]

    def ask(self, *words: str, folder: Path | None = None, **more: str) -> str:
        """Return what one of Slurm's commands says; fail with its words where it fails."""
        env = {**os.environ, **self.env, **more}
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, script: str, folder: Path, *flags: str, **env: str) -> int:
        """Submit a script of the user's own from `folder`; return the job's number."""
        path = folder / "job.sh"
        path.write_text(script, encoding="utf-8")
        return int(self.ask("sbatch", "--parsable", *flags, str(path), folder=folder, **env))

    def about(self, job: int) -> dict[str, str]:
        """Return what the controller says about a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.ask("scontrol", "show", "job", str(job), "--oneliner")))

    def start_again(self, job: int) -> None:
        """Have a job that requeues itself start soon; Slurm would hold it back for two minutes."""
        until(lambda: self.about(job)["JobState"] == "PENDING")
        # A node refuses what was granted in the second in which it ended the job before: "Job credential revoked".
        time.sleep(2.5)
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now")

    def ended(self, job: int) -> str:
        """Wait until the job has ended for good; return its last state."""
        until(lambda: self.about(job)["JobState"] in _LAST)
        return self.about(job)["JobState"]

    def is_ready(self) -> bool:
        """Whether both nodes wait for jobs."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            return self.ask("sinfo", "--noheader", "--Node", "--partition=all", "--format=%T").split() == ["idle"] * 2
        return False


@contextlib.contextmanager
def running_cluster() -> Iterator[Cluster]:
    """Start a cluster of two nodes; end every process of it afterwards."""
    need([name for name in NEEDED if shutil.which(name, path=_PATH) is None])
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path: that of a socket is limited to 107 characters
    running = Cluster({"SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"})  # n1 is in no DNS
    with contextlib.ExitStack() as daemons:
        daemons.callback(shutil.rmtree, folder, ignore_errors=True)
        _prepare(folder)
        of_munge = [f"--{name}={folder}/munge.{name}" for name in ("socket", "pid-file", "log-file", "seed-file")]
        munge = ("munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *of_munge)
        daemons.enter_context(_daemon(folder, *munge))
        until((folder / "munge.socket").exists, 20)
        for words in (("slurmctld", "-D"), ("slurmd", "-D", "-N", "n1"), ("slurmd", "-D", "-N", "n2")):
            daemons.enter_context(_daemon(folder, *words, **running.env))
        until(running.is_ready, 60)
        try:
            yield running
        finally:
            for job in running.ask("squeue", "--noheader", "--format=%A").split():
                with contextlib.suppress(AssertionError):  # it may have ended meanwhile
                    running.ask("scancel", job)
                    running.ask("scancel", "--signal=KILL", "--full", job)
            with contextlib.suppress(AssertionError):
                until(lambda: not running.ask("squeue", "--noheader").strip(), 30)


def _prepare(folder: Path) -> None:
    (folder / "state").mkdir()
    (folder / "munge.key").touch(mode=0o600)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    folder.chmod(0o755)  # munge refuses a socket that others cannot reach
    conf = _CONF.format(folder=folder, user=getpass.getuser(), ports=[free_port() for _ in range(3)])
    (folder / "slurm.conf").write_text(conf, encoding="utf-8")
    # Files that are everywhere stand for the devices; and Slurm looks for the last file beside slurm.conf.
    (folder / "gres.conf").write_text("NodeName=n[1-2] Name=gpu File=/dev/null,/dev/zero\n", encoding="utf-8")
    (folder / "cgroup.conf").write_text("CgroupAutomount=no\n", encoding="utf-8")


def _daemon(folder: Path, name: str, *words: str, **env: str) -> Running:
    log = (folder / f"{name}.out").open("ab")
    return Running(
        [str(shutil.which(name, path=_PATH)), *words],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        text=True,
        start_new_session=True,
        # The kernel ends a daemon when the tests are killed, which then cannot do it.
        preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
    )
