"""Bars: what mpidist must reach, and whether a run reached it."""
