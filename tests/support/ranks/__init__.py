"""Ranks for tests: which kind of test to write, and what each kind runs on.

1. **A plain test** runs in one process. It needs nothing of this room. Put ``@pytest.mark.one_rank`` on it (or
   ``pytestmark = pytest.mark.one_rank`` in its file) if ranks have no part in what it is about.
2. **A test that all ranks carry out in step** is a plain function, too: without that mark it runs in one process and in
   the session of two ranks (``mpirun -n 2 python -m pytest --with-mpi``). It passes where it passes on all ranks, and a
   rank that hangs is named with its stacks (``sessions``, ``agreement``). More marks, each one line:
   ``counts`` where the number of ranks matters (also on 3; ``powers``: on 4), ``nodes`` where nodes do (2 of 2 ranks).
   The fixture ``strategy`` runs the test in every layout of replicas (``layouts``). Tests share strategies
   (``shared``); one that closes or breaks its own is marked ``own_strategy``.
3. **A test that hands a function to ranks**, ``results = pool.run(function, 3, *args)``, when ranks are to do different
   things, or when something else than they must look on: a job that is already warm carries it out in milliseconds.
   The function closes what it opens.
4. **A test of a whole program**: ``jobs.run_script(source, 2)`` and ``jobs.run_alone(function, 2)`` start a job of
   their own, which takes a second. For what is about starting, dying, the environment of MPI, exit codes and output.

Kinds 3 and 4 are marked ``jobs``, which keeps them out of ``make quick``; what takes minutes is marked ``long``.
Every wait has a deadline, after which the message names test and rank.
"""
