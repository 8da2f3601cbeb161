"""Variants of one job, measured side by side; forecasts for more devices.

grid       the variants that were asked for, and those that cannot run
measured   steps of a job in a rank: their cost, and its parts (clock)
trials     one variant as a command in a folder, which keeps the result
race       several variants, alive at the same time, that run by turns
rounds     a comparison: trials, races until the ratios are known well enough (numbers), whole trainings
records    readers of run folders, and of former runs
rows       the table of results; answer, the recommendation in words; report, the files (tables, charts)
forecast   step times on more devices: timeline (one step), networks (links)
"""
