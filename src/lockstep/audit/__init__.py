"""Whether N ranks train one process's model, judged for a training script that knows nothing of lockstep."""

VARIABLE = "LOCKSTEP_AUDIT"
"""The environment variable by which a process knows what to observe: JSON of mode, folder and steps."""
