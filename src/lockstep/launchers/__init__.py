"""How the ranks of a run start, or join, and meet. `table.py` lists the launchers."""
