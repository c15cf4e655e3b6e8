"""Measuring: the ranks of a run, how calls are timed, how results are kept, and the machine they come from."""
