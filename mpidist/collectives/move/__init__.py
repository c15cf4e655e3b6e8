"""Collectives that move arrays and reduce nothing: all-gather and broadcast."""
