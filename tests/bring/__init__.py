"""Training loops that people bring: inputs, the plain twin, and the runner that compares both."""
