"""Training scripts that have never heard of lockstep, each right or with one fault: `ddp.py KIND`."""
