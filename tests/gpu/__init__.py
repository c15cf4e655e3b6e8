"""What needs a real GPU; one is enough. ``make test-gpu`` runs it, ``python -m tests.gpu`` its parts one by one.

On a machine without one the same tests run on the stand-in for CuPy: see ``test_on_stand_in`` in tests/support.
"""
