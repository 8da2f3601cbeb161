"""How the processes of a run come to be: inline, spawn, environment, manual. One file each, listed in `table.py`."""
