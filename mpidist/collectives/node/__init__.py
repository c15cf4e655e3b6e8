"""The ranks of one node: their board, their shared memory, and data among them."""
