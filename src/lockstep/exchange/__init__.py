"""How the copies of one model come to one gradient. A method is one file and one line of `config/registry.py`."""
