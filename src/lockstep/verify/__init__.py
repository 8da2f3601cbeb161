"""Proofs: gradients of N ranks against one, curves of variants, a run judged by its records."""
