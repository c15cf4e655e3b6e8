"""Settings of the tests of types."""

# Programs for type checkers, which need the typing_extensions that come with mypy: no docstrings to be run.
collect_ignore = ["program.py", "mistakes.py"]
