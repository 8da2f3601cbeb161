"""Variants of one job, run side by side: which way is best on this hardware, and why.

grid       the variants that were asked for, and those that cannot be
measured   one of them in a rank, watched: what its steps cost, and where their time goes (energy, matrix)
trials     one of them as a command of its own; what became of it, on the disk
race       several that live at the same time, and run by turns
rounds     the course of a comparison: trials, then races, until the ratios are known well enough
numbers    a ratio, and the interval that holds it
whole      whole trainings of each variant
rows       the table that comes of it; past, the same of runs that have ended, and their list; records, one run's own
answer     the recommendation in words
report     what is written down, with its charts
forecast   what more devices would buy: timeline (one step), networks (links), profiler (where a step exchanges)
"""
