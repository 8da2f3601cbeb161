"""Measurements, figures and exercises of the notes in `docs/notes`."""
