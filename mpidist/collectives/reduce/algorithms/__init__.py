"""The all-reduce algorithms for arrays in host memory, and the inter-node algorithms."""

from mpidist.collectives.reduce.registry import import_files

import_files(__name__, __path__)
