"""What is checked while a run goes on: replicas, samples, finite numbers; and how two checkpoints differ."""
