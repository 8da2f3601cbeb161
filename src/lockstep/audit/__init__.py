"""Judge whether the ranks of any training script train one process's model."""

BEGUN = "begun"
"""Name of an empty file in the audit's folder, as old as the audit."""
REFUSED = "refused.txt"
"""File in it with the reason why the ranks' steps cannot be recorded or replayed."""
VARIABLE = "LOCKSTEP_AUDIT"
"""Environment variable of an observed process: JSON of mode, folder and steps or passes."""
