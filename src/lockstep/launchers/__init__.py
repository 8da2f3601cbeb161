"""How the ranks of a run start, or join, and meet. `config/registry.py` lists the launchers."""
