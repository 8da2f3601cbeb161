"""Whether a job can run here: `examine.py` looks, on every rank."""
