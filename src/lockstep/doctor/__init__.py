"""What `lockstep doctor` looks at: one file a group of findings. `examine.py` goes through them on every rank."""
