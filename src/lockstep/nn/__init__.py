"""Layers that span the ranks."""
