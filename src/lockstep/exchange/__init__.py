"""Gradient exchange between copies of a model. A method is one file and one line of `config/registry.py`."""
