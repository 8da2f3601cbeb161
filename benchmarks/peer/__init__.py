"""The same work in others' hands: scripts that torchrun starts (see `benchmarks.peer_faults`)."""
