"""One run: its exclusive folder, and its course from start to summary."""
