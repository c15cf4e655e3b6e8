"""Observers: trace, report, flight record, and the guard that finds who waits for whom."""
