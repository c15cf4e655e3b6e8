"""What looks on: trace, report, flight record, and the guard that finds out who waits for whom."""
