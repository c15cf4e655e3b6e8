import sys
import time

import numpy as np

from mpidist.collectives import Communicator

c = Communicator()
x = np.ones(1 << 20, np.float32)
t = time.time()
n = 0
secs = float(sys.argv[1])
while True:
    c.all_reduce("sum", x)
    n += 1
    if n % 10 == 0 and c.all_reduce("max", np.array([float(time.time() - t > secs)]))[0]:
        break
if c.rank == 0:
    from mpidist.collectives.observe.lateness import sampler
    from mpidist.collectives.observe.stragglers import straggler_watch

    w = straggler_watch()
    print("found", list(map(str, w.found.values())), n, flush=True)
    print(np.frombuffer(sampler().samples().numbers, np.uint16).reshape(-1, 5)[-8:].tolist())
