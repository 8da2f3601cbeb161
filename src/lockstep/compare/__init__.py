"""Variants of one job, measured side by side; forecasts for more devices.

grid       the variants that were asked for, and those that cannot be
measured   one of them in a rank, watched: what its steps cost, and where their time goes (clock)
trials     one of them as a command in a folder, which keeps what became of it
race       several that live at the same time, and run by turns
rounds     a comparison: trials, races until the ratios are known well enough (numbers), whole trainings
records    what a run's folder tells, and runs that were made before
rows       the table that comes of it; answer, the recommendation in words; report, what is written (tables, charts)
forecast   what more devices would bring: timeline (one step), networks (links)
"""
