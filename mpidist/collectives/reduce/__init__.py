"""Reductions: plans and packs, which algorithm is taken at which size, and one file for each algorithm."""
