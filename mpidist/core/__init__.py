"""Ground floor: enums, errors, nests, devices, settings, the context stack; no MPI, no arrays."""
