"""The benchmark suite: mpidist beside the bare MPI call, gloo, and one copy of the buffer; ``python -m benchmarks``.

Imports go down: ``suite`` (commands that measure), ``reports``, ``bars``, ``cases``, ``predicting``, ``measuring``.
"""
