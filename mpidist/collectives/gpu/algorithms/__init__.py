"""The algorithms of an all-reduce of arrays on GPUs, one file each."""

from mpidist.collectives.reduce.registry import import_files

import_files(__name__, __path__)
