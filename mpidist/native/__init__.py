"""The native core in C, and how it is built; ``collectives.node`` is its Python face."""
