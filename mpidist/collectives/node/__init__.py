"""The ranks of one node: native core, shared memory, and packed arrays."""
