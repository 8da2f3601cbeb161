"""Proofs: gradients of N ranks, curves of variants, and run records."""
