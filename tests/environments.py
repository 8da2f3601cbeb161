"""What programs that start ranks set in the environment, in short."""

from __future__ import annotations

_SRUN = (
    "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NTASKS=3 SLURM_STEP_NUM_TASKS=3 SLURM_LOCALID=0 "
    "SLURM_NODEID=1 SLURM_NNODES=2 SLURM_STEP_NUM_NODES=2 SLURM_STEP_TASKS_PER_NODE=2,1 "
    "SLURM_STEP_NODELIST=localhost,127.0.0.[2-3]"
)
_AGENT = "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500"
_PROGRAMS = {
    "srun": _SRUN,  # srun -N2 -n3, in its last task
    "srun-one-node": _SRUN + " SLURM_NODEID=0 SLURM_LOCALID=2 SLURM_STEP_NUM_NODES=1 SLURM_STEP_TASKS_PER_NODE=3 "
    "SLURM_STEP_NODELIST=no-such-name",
    "step": "SLURM_JOB_ID=7 SLURM_STEP_ID=0 SLURM_PROCID=0",
    "batch": "SLURM_JOB_ID=7 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2",
    "array": "SLURM_JOB_ID=9 SLURM_ARRAY_TASK_ID=6 SLURM_ARRAY_TASK_MIN=2 SLURM_ARRAY_TASK_MAX=8 "
    "SLURM_ARRAY_TASK_STEP=2 SLURM_ARRAY_TASK_COUNT=4",
    "ranks": f"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 {_AGENT}",
    "torchrun": f"RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 {_AGENT} "
    "TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_RUN_ID=job",
    "open-mpi": "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2",
    "mpich": "PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2",
}


def environment(words: str) -> dict[str, str]:
    """Return the variables that programs set, as in "srun ranks WORLD_SIZE=4 -LOCAL_RANK": later words win."""
    env: dict[str, str] = {}
    for word in words.split():
        if word.startswith("-"):
            del env[word[1:]]
        else:
            env |= dict(each.split("=", 1) for each in _PROGRAMS.get(word, word).split())
    return env
