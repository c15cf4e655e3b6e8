"""Collectives that move arrays: all-gather and broadcast, and the rows of a reduce-scatter."""
