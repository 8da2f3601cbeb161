"""The configuration of a run: its values, their options, and the registry of strategies and launchers. No torch."""
