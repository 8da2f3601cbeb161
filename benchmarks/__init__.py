"""What lockstep costs and gains, measured: `python -m benchmarks [NAME …]`.

Every number is a ratio or a difference of runs that took turns on one machine, A B A B …, because a machine's speed
drifts by more than what is to be measured. A table says median, least and most over the rounds.
"""
