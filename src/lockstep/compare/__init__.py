"""Variants of one job, run side by side: which way is best on this hardware, and why.

grid       the variants that were asked for, and those that cannot be
measured   one of them in a rank: what some steps of the job's own loop cost, and where the time goes
trials     one of them as a command of its own; what became of it, on the disk
rounds     all of them by turns, until their ratios are known well enough
numbers    a ratio and its interval from noisy rounds
rows       the table that comes of it
answer     the recommendation in words
"""
