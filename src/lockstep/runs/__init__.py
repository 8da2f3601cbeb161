"""One run: its folder, its position, records and checkpoints."""
