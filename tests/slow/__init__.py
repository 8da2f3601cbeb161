"""Whole matrices: CI runs a slice."""
