"""Experiments that train and compare: N ranks against one, and variants of a run against each other."""
