"""The native core: C sources, and how pip and make compile them; its Python face is ``collectives.node``."""
