"""What every room of the collectives stands on: MPI called without ever blocking, its types, and small objects."""
