"""The suite: a file for each command that measures."""
