"""Checks of a running job: replicas, samples, finite numbers; and the differences of two checkpoints."""
