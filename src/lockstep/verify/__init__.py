"""What proofs are made with: digests and replicas, the sample ledger, the difference of two checkpoints."""
