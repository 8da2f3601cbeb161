"""What `lockstep doctor` looks at: one file a subject. `examine.py` goes through them on every rank."""
