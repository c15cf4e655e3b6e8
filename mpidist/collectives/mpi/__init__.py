"""The base of all collectives: MPI without blocking calls, its types, and small objects."""
