"""The algorithms of an all-reduce of arrays in host memory, and the ways between nodes: one file each."""

from mpidist.collectives.reduce.registry import import_files

import_files(__name__, __path__)
