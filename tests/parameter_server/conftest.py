"""What pytest leaves alone here."""

from __future__ import annotations

# It is for the ranks of jobs.
collect_ignore = ["fault_programs.py"]
