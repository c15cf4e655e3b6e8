"""Collectives that move arrays, and messages between two ranks."""
