"""Training steps: assembly, loop, evaluation, saving."""
