"""Proofs that models are the same: of replicas while they train, of N ranks against one, of two checkpoints."""
