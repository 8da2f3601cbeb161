"""Ranks under faults: real processes, killed, stopped and cut off."""
