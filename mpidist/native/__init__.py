"""The native core: C sources, and how pip and make compile them.

Its Python face is ``collectives.node.core``.
"""
