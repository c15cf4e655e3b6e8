"""The subcommands of ``python -m mpidist``, one file each.

Each file has ``HELP``, a line for the list of commands, ``add_arguments(parser)``, and ``run(arguments)``, which
returns the exit status. A command of several ranks prints on rank 0.
"""

from mpidist.cli import doctor, example, flight, launch, merge_traces, top, tune

COMMANDS = {
    "doctor": doctor,
    "example": example,
    "flight": flight,
    "launch": launch,
    "top": top,
    "trace": merge_traces,
    "tune": tune,
}
"""The commands by name."""
