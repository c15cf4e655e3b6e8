"""Non-blocking MPI: polling, datatypes, and exchange of arrays, objects and messages."""
