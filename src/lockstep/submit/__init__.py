"""Handing a run to Slurm: what is asked of the scheduler, the script that says it, and the job's way to its end."""
