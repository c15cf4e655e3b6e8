"""Ground floor: enums, errors, nests, device strings, settings and the context stack; no MPI, no arrays."""
