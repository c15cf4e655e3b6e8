"""The facts that ``python -m mpidist doctor`` gathers, of each rank and of all together."""
