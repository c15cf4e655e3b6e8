"""Chaos: the real example is trained while ranks, signals, disks and files fail it."""
