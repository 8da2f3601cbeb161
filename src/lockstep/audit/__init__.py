"""Whether N ranks train one process's model, judged for a training script that knows nothing of lockstep."""

BEGUN = "begun"
"""Name of an empty file in the audit's folder, as old as the audit."""
VARIABLE = "LOCKSTEP_AUDIT"
"""The environment variable by which a process knows what to observe: JSON of mode, folder and steps."""
