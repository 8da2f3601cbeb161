"""Checks of a running job. Replicas, samples, finite numbers; and the differences of two checkpoints."""
