"""Reductions: plans, packs, the choice of an algorithm, and the algorithms."""
