"""The faults: what is wrong, which text of the library becomes which, and the tests that are to see it.

Each is small, keeps the library importable, and is of a kind that happens: a wrong border, a lost wait, a dropped
error, a stale view, a forgotten copy. The text is found exactly once in its file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

# What counts as one room of its own: modules with nothing but public names.
FACADES = "facades"
_FACADES = ("v1", "experimental", "coordinator", "optimizers", "metrics")


@dataclass(frozen=True)
class Fault:
    """One fault.

    Args:
        name: What is wrong, as a sentence.
        file: The file of the library.
        old: The text that is replaced.
        new: What takes its place.
        tests: The test files that are to see it.
        ranks: Of the session that runs them, which takes the tests that ``make test`` does; 1 for pytest alone.
        ranks_per_node: Of virtual nodes; None for real ones.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    ranks: int = 1
    ranks_per_node: int | None = None

    @property
    def mark(self) -> str | None:
        """Which tests a session of so many ranks takes; None for all."""
        return "nodes" if self.ranks_per_node else {3: "counts", 4: "powers"}.get(self.ranks)

    @property
    def room(self) -> str:
        """The room of the library that it is in."""
        room = PurePosixPath(self.file).parts[1].removesuffix(".py")
        return FACADES if room in _FACADES else room

    def put_into(self, text: str) -> str:
        """Return the text of the file with the fault in it.

        Raises:
            ValueError: ``old`` is not there exactly once.
        """
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file} has this text {count} times, expected once: {self.old!r}")
        return text.replace(self.old, self.new)


_NATIVE = (
    Fault(
        "the id of the native core leaves headers out",
        "mpidist/native/build_library.py",
        'return sorted([*folder.glob("*.c"), *folder.glob("*.h")])',
        'return sorted(folder.glob("*.c"))',
        ("tests/native/test_build_library.py",),
    ),
    Fault(
        "a library for another machine is taken",
        "mpidist/native/build_library.py",
        'if name != "$CC" and',
        'if name == "$CC" and',
        ("tests/native/test_build_library.py",),
    ),
    Fault(
        "the last element of every slice is not copied into the result",
        "mpidist/native/chunks.c",
        "deliver(c, lane(c, s, k), start, n);",
        "deliver(c, lane(c, s, k), start, n - 1);",
        ("tests/collectives/test_algorithms.py",),
        ranks=2,
    ),
    Fault(
        "the parts of a message are read from the slots of the part before",
        "mpidist/native/chunks.c",
        "const char *slot = c->slots[r] + chunk_at(c, chunk)",
        "const char *slot = c->slots[r] + chunk_at(c, chunk + 1)",
        ("tests/collectives/test_algorithms.py",),
        ranks=2,
    ),
    Fault(
        "small sums begin with the last rank",
        "mpidist/native/core.c",
        "combined[inputs++] = inline_input(c, r, ",
        "combined[inputs++] = inline_input(c, c->ranks - 1 - r, ",
        ("tests/collectives/test_order_of_sums.py",),
        ranks=3,
    ),
    Fault(
        "a mean over several nodes is divided inside the node, too",
        "mpidist/native/chunks.c",
        "double divisor = c->on_wire ? 0 : c->call.divisor;",
        "double divisor = c->call.divisor;",
        ("tests/collectives/test_algorithms.py",),
        ranks=4,
        ranks_per_node=2,
    ),
    Fault(
        "a result of another dtype is filled on the short way",
        "mpidist/native/fast_path.c",
        "s.dtype != c->result.dtype || s.axes",
        "s.axes",
        ("tests/collectives/test_short_results.py",),
        ranks=2,
    ),
    Fault(
        "the result of a list is written over another array of it that is still to be read",
        "mpidist/native/fast_path.c",
        "c->out != NONE && nc_overlap(f->given, n, f->results, n)",
        "0",
        ("tests/collectives/test_short_lists.py",),
        ranks=2,
    ),
    Fault(
        "lists of other shapes have one signature on the short way",
        "mpidist/native/signatures.c",
        "memcpy(f->shapes + s->words, one.shape,",
        "memset(f->shapes + s->words, 0,",
        ("tests/collectives/test_short_lists.py",),
        ranks=2,
    ),
    Fault(
        "a part stays where it lies in the result, though ranks give unequal ones",
        "mpidist/native/core.c",
        " && c->border[c->rank] == c->bytes * (size_t)c->rank;",
        ";",
        ("tests/collectives/test_short_results.py",),
        ranks=3,
    ),
    Fault(
        "small arrays are gathered from the first rank alone",
        "mpidist/native/core.c",
        "const char *from = r == c->rank ? c->in[0] : inline_data(c, r);",
        "const char *from = r == c->rank ? c->in[0] : inline_data(c, 0);",
        ("tests/collectives/test_movement.py",),
        ranks=2,
    ),
    Fault(
        "a slice is shown where others may still take one of before",
        "mpidist/native/chunks.c",
        "reached(c, TAKEN, free, c->ranks))",
        "reached(c, TAKEN, free - 1, c->ranks))",
        ("tests/native/test_threads.py",),
    ),
    Fault(
        "what a rank counts may be seen before what it has written",
        "mpidist/native/core.h",
        ".value, value, memory_order_release);",
        ".value, value, memory_order_relaxed);",
        ("tests/native/test_threads.py",),
    ),
    Fault(
        "a rank returns while others still write into its result",
        "mpidist/native/push.c",
        "c->phase == CANCELED || !reached(c, LEFT, c->exits, c->ranks)",
        "c->phase == CANCELED",
        ("tests/native/test_threads.py",),
    ),
    Fault(
        "ranks write into the result of a rank that has left the call",
        "mpidist/native/push.c",
        "if (get(c, rank, ABANDONED))\n        return ECANCELED;",
        "",
        ("tests/native/test_kills.py",),
    ),
    Fault(
        "a rank leaves a call while another rank is inside a write",
        "mpidist/native/push.c",
        "while ((is_writing[r] = r != c->rank && get(c, r, WRITING)) && now() < end)",
        "while ((is_writing[r] = 0) && now() < end)",
        ("tests/collectives/test_push.py",),
    ),
    Fault(
        "a rank that gave up pushes changed data at its end",
        "mpidist/native/push.c",
        "if (get(c, c->rank, ABANDONED))",
        "if (0)",
        ("tests/collectives/test_push.py",),
    ),
    Fault(
        "pushed sums take the scratch memory of another input",
        "mpidist/native/push.c",
        "            number++;\n        }",
        "            number += 2;\n        }",
        ("tests/native/test_threads.py",),
    ),
    Fault(
        "a short count of the kernel is taken for all data",
        "mpidist/native/memory.c",
        "size_t left = (size_t)done;",
        "size_t left = SIZE_MAX;",
        ("tests/collectives/test_push.py",),
    ),
    Fault(
        "other ranks wait after a refused access",
        "mpidist/native/push.c",
        "        if (value >= FAILED)\n",
        "        if (value > FAILED + 1000)\n",
        ("tests/collectives/test_push.py",),
    ),
    Fault(
        "ties are rounded up to bfloat16",
        "mpidist/native/kernels_table.h",
        "0x7fffu + (bits >> 16 & 1)",
        "0x8000u",
        ("tests/native/test_kernels.py",),
    ),
    Fault(
        "a slice for other nodes is taken from where slots do not begin",
        "mpidist/native/chunks.c",
        "slice->lane = SKEW + lane_at(c, k);",
        "slice->lane = lane_at(c, k);",
        ("tests/collectives/test_all_reduce.py",),
        ranks=4,
        ranks_per_node=2,
    ),
    Fault(
        "the build id leaves the Python sources out",
        "mpidist/native/build_library.py",
        '[^./][^/]*\\.(py|c|h)")',
        '[^./][^/]*\\.(c|h)")',
        ("tests/topology/test_agreement.py",),
    ),
    Fault(
        "the seconds of the deadline of MPI_Finalize are taken for minutes",
        "mpidist/native/leaving.c",
        "        if (waited >= leaving.limit_seconds) {",
        "        if (waited >= 60 * leaving.limit_seconds) {",
        ("tests/topology/test_suspension.py",),
    ),
)

_CORE = (
    Fault(
        "the leaves of a dict come in the order in which it was built",
        "mpidist/core/nest.py",
        "        return sorted(mapping)\n",
        "        return list(mapping)\n",
        ("tests/core/test_nest.py",),
    ),
    Fault(
        "options of a call that are defaults replace those of the strategy",
        "mpidist/core/options.py",
        "if getattr(other, f.name) != getattr(_DEFAULTS, f.name)",
        "if getattr(other, f.name) != getattr(self, f.name)",
        ("tests/core/test_options.py",),
    ),
    Fault(
        "the time for which a job is suspended counts towards its deadlines",
        "mpidist/core/concurrency.py",
        "self._seconds += min(now - self._last, _LONGEST_GAP_SECONDS)",
        "self._seconds += now - self._last",
        ("tests/topology/test_suspension.py",),
    ),
)

_ARRAYS = (
    Fault(
        "sums of float16 and bfloat16 are rounded after every addend",
        "mpidist/arrays/dtypes.py",
        "        return np.dtype(np.float32), dtype\n",
        "        return dtype, dtype\n",
        ("tests/acceptance/test_reduce_and_gather.py",),
    ),
    Fault(
        "page-locked memory is given to others while a GPU still reads it",
        "mpidist/arrays/streams.py",
        "            self._items.append((event, memory))",
        "            del event, memory",
        ("tests/arrays/test_cupy_ops.py",),
    ),
    Fault(
        "all arrays of a kernel launch begin at its first tile",
        "mpidist/arrays/kernels.py",
        "        table[1:, 3] = np.cumsum(tiles[:-1])\n",
        "",
        ("tests/arrays/test_kernels.py",),
    ),
    Fault(
        "the mean of whole numbers is a whole number",
        "mpidist/arrays/dtypes.py",
        "        return np.dtype(np.float64), np.dtype(np.float64)\n",
        "        return np.dtype(np.float64), dtype\n",
        ("tests/acceptance/test_reduce_and_gather.py",),
    ),
)

_TOPOLOGY = (
    Fault(
        "GPUs that do not divide are dealt to two processes at once",
        "mpidist/topology/topology.py",
        "start = place * each + min(place, rest)",
        "start = place * each",
        ("tests/topology/test_topology.py",),
    ),
    Fault(
        "the first of several worlds of one rank takes itself for the whole job",
        "mpidist/topology/start.py",
        "if info is None or (size > info.rank and size >= (info.size or 0)):",
        "if info is None or size > info.rank:",
        ("tests/topology/test_start.py",),
    ),
    Fault(
        "WORLD_SIZE=2 is accepted with an MPI world of one rank",
        "mpidist/topology/start.py",
        "    if size == 1:\n        _check_world_size_variable()\n",
        "",
        ("tests/topology/test_start.py",),
    ),
    Fault(
        "ranks compare their versions but not their builds",
        "mpidist/topology/same_program.py",
        'f"{__version__}, build {build_id()}"}',
        'f"{__version__}, build"}',
        ("tests/topology/test_agreement.py",),
    ),
    Fault(
        "MPIDIST_RANKS_PER_NODE may differ between ranks",
        "mpidist/topology/same_program.py",
        "if setting.same_on_all}",
        'if setting.same_on_all and name == "MPIDIST_JOBS"}',
        ("tests/topology/test_agreement.py",),
    ),
    Fault(
        "a forked child ends the MPI of its parent",
        "mpidist/topology/finalize.py",
        "        atexit.unregister(_finalize_at_exit)\n",
        "        pass\n",
        ("tests/collectives/test_interruptions.py",),
    ),
    Fault(
        "a rank that has made no strategy does not answer the ranks that wait for it",
        "mpidist/topology/roll_call.py",
        "            self._answers.append(world.Isend(answer, rank, ROLL_CALL_ANSWER))\n",
        "            del answer, rank\n",
        ("tests/topology/test_start.py",),
    ),
)

_CLUSTER_RESOLVER = (
    Fault(
        "tasks are dealt out in the order of their names",
        "mpidist/cluster_resolver/cluster_spec.py",
        "for job, count in jobs.items() for index in range(count)]",
        "for job, count in sorted(jobs.items()) for index in range(count)]",
        ("tests/cluster_resolver/test_slurm_cluster_resolver.py",),
    ),
    Fault(
        "every Slurm task of a node takes the GPUs of the first",
        "mpidist/cluster_resolver/slurm_cluster_resolver.py",
        "return visible[place * each : (place + 1) * each]",
        "return visible[:each]",
        ("tests/cluster_resolver/test_slurm_cluster_resolver.py",),
    ),
    Fault(
        "a rank counts itself among the ranks before it on its node",
        "mpidist/cluster_resolver/mpi_cluster_resolver.py",
        "return nodes[: self.rank].count(nodes[self.rank])",
        "return nodes[: self.rank + 1].count(nodes[self.rank])",
        ("tests/cluster_resolver/test_mpi_cluster_resolver.py",),
    ),
    Fault(
        "two resolvers may have one task with the same index",
        "mpidist/cluster_resolver/simple_cluster_resolver.py",
        "        if twice:\n",
        "        if len(twice) > 1:\n",
        ("tests/cluster_resolver/test_simple_and_union.py",),
    ),
)

_COLLECTIVES = (
    Fault(
        "a native core of other sources is used",
        "mpidist/collectives/node/native.py",
        "if built != expected:",
        "if not built:",
        ("tests/collectives/test_native.py",),
    ),
    Fault(
        "slices on their way between nodes are not waited for",
        "mpidist/collectives/reduce/algorithms/two_level.py",
        "while self._parts and self._parts[0][1] is None:",
        "while self._parts:",
        ("tests/collectives/test_algorithms.py",),
        ranks=4,
        ranks_per_node=2,
    ),
    Fault(
        "a shared result is written again while the first rank still holds it",
        "mpidist/collectives/node/memory.py",
        "any(bits >> index & 1 for bits in held)",
        "any(bits >> index & 1 for bits in held[1:])",
        ("tests/collectives/test_own_arrays.py",),
        ranks=2,
    ),
    Fault(
        "the rank that comes last does not compare its call with the others'",
        "mpidist/collectives/channel/handshake.py",
        "if core.state in WAITING or core.state == MISMATCH:",
        "if core.state in WAITING:",
        ("tests/collectives/test_mismatch.py",),
        ranks=2,
    ),
    Fault(
        "local changes of a rank are not compared with the other ranks'",
        "mpidist/collectives/channel/handshake.py",
        "identity ^= operation.changes.checksum",
        "identity ^= 0",
        ("tests/strategies/test_drift.py",),
        ranks=2,
    ),
    Fault(
        "a call that opens with its data goes on when the ids differ",
        "mpidist/collectives/channel/handshake.py",
        "return self._core.state != MISMATCH",
        "return True",
        ("tests/collectives/test_mismatch.py",),
        ranks=2,
    ),
    Fault(
        "a node goes on with one that has other data",
        "mpidist/native/leaders.c",
        "theirs->id != c->call.id || theirs",
        "theirs",
        ("tests/native/test_leaders.py",),
    ),
    Fault(
        "the last of several nodes that are no power of two gets no result",
        "mpidist/native/leaders.c",
        "if (me < l->power && me >= extra)",
        "if (me < l->power && me >= extra - 1)",
        ("tests/native/test_leaders.py",),
    ),
    Fault(
        "a mean over nodes is not divided",
        "mpidist/native/core.c",
        "nc_divide(c->sum, c->count, c->call.dtype, c->call.divisor);",
        ";",
        ("tests/collectives/test_algorithms.py",),
        ranks=4,
        ranks_per_node=2,
    ),
    Fault(
        "two calls of other structures are taken for the same",
        "mpidist/collectives/reduce/plan.py",
        "{signature_text(signature, on_device)}{note_text('as', note)}{_options_text(options)}",
        "{signature_text(signature, on_device)}{_options_text(options)}",
        ("tests/acceptance/test_rank_mismatch.py",),
        ranks=2,
    ),
    Fault(
        "a deadline that is earlier than the report of a long wait never comes",
        "mpidist/core/concurrency.py",
        "        if waited > self._limit and",
        "        if waited > max(self._limit, self._warn) and",
        ("tests/collectives/test_mismatch.py",),
    ),
    Fault(
        "a node whose first rank gives no answer is not asked",
        "mpidist/collectives/observe/hangs.py",
        "else query(1)",
        "else query(0)",
        ("tests/collectives/test_hang_queries.py",),
    ),
    Fault(
        "the error of a work that nobody waited for yet is dropped",
        "mpidist/collectives/channel/operation.py",
        "            self.fail(error)\n        else:",
        "            del error\n        else:",
        ("tests/collectives/test_work.py",),
        ranks=2,
    ),
    Fault(
        "an input that is also the result of another array is overwritten before it is read",
        "mpidist/collectives/node/packing.py",
        "bisect_left(starts, high) - bisect_right(ends, low)",
        "bisect_left(starts, low) - bisect_right(ends, low)",
        ("tests/collectives/test_packing.py",),
    ),
    Fault(
        "a mean over several nodes is not divided where each rank is a node",
        "mpidist/collectives/reduce/algorithms/two_level.py",
        "            divided(targets[0], job.divisor)\n",
        "",
        ("tests/collectives/test_algorithms.py",),
        ranks=4,
        ranks_per_node=2,
    ),
    Fault(
        "a rank takes the node of the rank that has its number there for its own",
        "mpidist/topology/topology.py",
        "self.node_index = self.node_of_rank[self.rank]",
        "self.node_index = self.node_of_rank[self.local_rank]",
        ("tests/collectives/test_all_reduce.py",),
        ranks=4,
        ranks_per_node=2,
    ),
    Fault(
        "small arrays are moved as if all ranks were on one node",
        "mpidist/collectives/move/move.py",
        "core = node.core if node.is_alone else None",
        "core = node.core",
        ("tests/collectives/test_movement.py",),
        ranks=4,
        ranks_per_node=2,
    ),
    Fault(
        "segments that are sent are not added to those that are there",
        "mpidist/collectives/reduce/algorithms/inter_node.py",
        "            combine(turned[: part.size], part, out=turned[: part.size])\n",
        "            turned[: part.size] = part\n",
        ("tests/collectives/test_ways_between_nodes.py",),
    ),
    Fault(
        "in a ring each rank passes on its own part and not the sum",
        "mpidist/collectives/reduce/algorithms/inter_node.py",
        "segments[mine] if step else inputs[mine]",
        "inputs[mine]",
        ("tests/collectives/test_algorithms.py",),
        ranks=3,
    ),
    Fault(
        "segments are doubled in the order in which they were halved",
        "mpidist/collectives/reduce/algorithms/inter_node.py",
        "in reversed(halved(n)):",
        "in halved(n):",
        ("tests/collectives/test_ways_between_nodes.py",),
    ),
    Fault(
        "the longer segments are not where those of others think",
        "mpidist/collectives/reduce/algorithms/inter_node.py",
        "number * length + min(number, more)",
        "number * length",
        ("tests/collectives/test_ways_between_nodes.py",),
    ),
    Fault(
        "a way says that it sends less than it does",
        "mpidist/collectives/reduce/algorithms/inter_node.py",
        "(had - kept) * length + min(had - kept, more)",
        "(had - kept) * length",
        ("tests/collectives/test_ways_between_nodes.py",),
    ),
    Fault(
        "more nodes do not make a ring dearer",
        "mpidist/collectives/reduce/cost_model.py",
        "        each.times\n        * (\n",
        "        1\n        * (\n",
        ("tests/collectives/test_cost_model.py",),
    ),
    Fault(
        "the host reduces before the GPU has copied to it",
        "mpidist/collectives/gpu/reduce.py",
        "        yield from until_event(copied)\n",
        "        del copied\n",
        ("tests/collectives/test_device_order.py",),
        ranks=2,
    ),
    Fault(
        "a mean of large arrays on GPUs is not divided",
        "mpidist/collectives/gpu/device_streams.py",
        "        in_place = [] if divisor is None else [",
        "        in_place = [] if divisor else [",
        ("tests/collectives/test_device_counts.py",),
        ranks=2,
    ),
    Fault(
        "messages in flight are not received when a communicator is closed",
        "mpidist/collectives/mpi/exchange.py",
        "    if not most_sent[0]:\n        return []\n",
        "    return []\n",
        ("tests/collectives/test_closing.py",),
        ranks=2,
    ),
    Fault(
        "messages that a program received count as in flight",
        "mpidist/collectives/move/point_to_point.py",
        "        self._count.received += 1\n        rank =",
        "        rank =",
        ("tests/collectives/test_closing.py",),
        ranks=2,
    ),
    Fault(
        "each rank of a node chooses the size of its slices by its own cores",
        "mpidist/collectives/node/node.py",
        "_OVERSUBSCRIBED_SLICE_BYTES if is_oversubscribed else _USUAL_SLICE_BYTES",
        "_OVERSUBSCRIBED_SLICE_BYTES if cores_are_short() else _USUAL_SLICE_BYTES",
        ("tests/topology/test_agreement.py",),
    ),
    Fault(
        "later communicators do not compare the settings of their ranks",
        "mpidist/collectives/node/node.py",
        "    check_same_everywhere(comm)\n    functions",
        "    functions",
        ("tests/topology/test_agreement.py",),
    ),
    Fault(
        "a /dev/shm that one rank has for itself is overlooked",
        "mpidist/collectives/node/node.py",
        "comm.Allreduce(mine, found, import_mpi().MAX)",
        "comm.Allreduce(mine, found, import_mpi().MIN)",
        ("tests/topology/test_agreement.py",),
    ),
    Fault(
        "a result is not copied from its aligned copy into an array that is not aligned",
        "mpidist/collectives/node/packing.py",
        "            elif not _is_in_order(results[index]):\n",
        "            elif not results[index].flags.c_contiguous:\n",
        ("tests/collectives/test_alignment.py",),
        ranks=2,
    ),
    Fault(
        "a process with several threads is called deadlocked",
        "mpidist/collectives/observe/hang_report.py",
        "    if len(waits) != 1 or len(threads) != 1:",
        "    if len(waits) != 1 or not threads:",
        ("tests/collectives/test_deadlock.py",),
    ),
    Fault(
        "sums on nodes of one rank are formed in results that share memory",
        "mpidist/collectives/reduce/algorithms/two_level.py",
        "are_apart = job.given is None or job.count <= per_slice or max(overlaps(job.given, job.given)) <= 1",
        "are_apart = True",
        ("tests/collectives/test_all_reduce.py",),
        ranks=2,
        ranks_per_node=1,
    ),
)

_VALUES = (
    Fault(
        "assigning to a sum gives each copy the whole",
        "mpidist/values/synchronization.py",
        "value = (total / variable.distribute_strategy.num_replicas_in_sync).astype(variable.dtype)",
        "value = total.astype(variable.dtype)",
        ("tests/acceptance/test_variable_tables.py",),
    ),
    Fault(
        "each rank keeps its own value where that of the first replica counts",
        "mpidist/values/synchronization.py",
        "return extended.broadcast_nest(mine, note=doing)",
        "return mine",
        ("tests/acceptance/test_variable_tables.py",),
        ranks=2,
    ),
    Fault(
        "a copy of a variable in run() is made",
        "mpidist/values/variable.py",
        "is_in_scope = frame.strategy is self._strategy and frame.replica_context is None",
        "is_in_scope = frame.strategy is self._strategy",
        ("tests/acceptance/test_variables.py",),
    ),
    Fault(
        "slots of an optimizer are not saved by the path of their variable",
        "mpidist/values/composite.py",
        "keys.append([*path, *name, *(",
        "keys.append([*name, *(",
        ("tests/checkpoint/test_slots.py",),
    ),
    Fault(
        "slots of two variables of one name are saved by that name",
        "mpidist/values/composite.py",
        " and names[variable.name] == 1",
        "",
        ("tests/checkpoint/test_slots.py",),
    ),
)

_CROSS_DEVICE_OPS = (
    Fault(
        "the results of several replicas share their memory",
        "mpidist/cross_device_ops/local_values.py",
        "put(value, device, copies=True) for device in devices[1:]",
        "put(value, device) for device in devices[1:]",
        ("tests/acceptance/test_replica_context.py",),
    ),
    Fault(
        "the mean of sparse values is their sum",
        "mpidist/cross_device_ops/cross_device_ops.py",
        "casts(local_values.divided(slices.values, divisor), result)",
        "casts(slices.values, result)",
        ("tests/acceptance/test_values.py",),
    ),
    Fault(
        "the result for one replica is the array of the caller",
        "mpidist/cross_device_ops/cross_device_ops.py",
        "own = here.copies(total) if is_input and total.dtype == dtype else here.casts(total, dtype)",
        "own = here.casts(total, dtype)",
        ("tests/acceptance/test_cross_device_ops.py",),
    ),
    Fault(
        "the last pack leaves out the remainder",
        "mpidist/cross_device_ops/kinds.py",
        "cuts = [length * k for k in range(num_packs)] + [len(flat)]",
        "cuts = [length * k for k in range(num_packs + 1)]",
        ("tests/acceptance/test_cross_device_ops.py",),
        ranks=2,
    ),
)

_INPUT = (
    Fault(
        "every worker begins with the larger sub-batches",
        "mpidist/input/dealing.py",
        "least + ((first + replica + step * shift) % count < larger)",
        "least + ((replica + step * shift) % count < larger)",
        ("tests/input/test_dealing.py",),
    ),
    Fault(
        "a pass that goes on from a state takes the last step again",
        "mpidist/input/iteration.py",
        "return self._remainder.after(self._taken).to_json()",
        "return self._remainder.after(max(0, self._taken - 1)).to_json()",
        ("tests/input/test_resume.py",),
    ),
    Fault(
        "take_while goes on behind the first element that does not fit",
        "mpidist/input/steps.py",
        'keep = takewhile if self.step == "take_while" else filter',
        "keep = filter",
        ("tests/input/test_transforms.py",),
    ),
)

_STRATEGIES = (
    Fault(
        "an error in the function of one rank is not told to the others",
        "mpidist/strategies/strategy_extended.py",
        '            self.announce(error, "the function given to run()")\n',
        "",
        ("tests/acceptance/test_going_on_after_errors.py",),
        ranks=2,
    ),
    Fault(
        "the mean of plain values is divided by the replicas instead of the ranks",
        "mpidist/strategies/strategy_extended.py",
        "divisor = len(self.replica_counts) if is_plain else self.num_replicas_in_sync",
        "divisor = self.num_replicas_in_sync",
        ("tests/acceptance/test_examples_reductions.py",),
        ranks=2,
    ),
    Fault(
        "update() of a variable accepts another value for each replica",
        "mpidist/strategies/strategy_extended.py",
        'value_checks.check_equal_on_replicas(f"update() of variable {var.name!r}", args, kwargs)',
        "pass",
        ("tests/acceptance/test_extended.py",),
    ),
    Fault(
        "a closed strategy of one rank can still be used",
        "mpidist/strategies/base.py",
        "        if self._extended.is_closed:\n",
        "        if self._extended.is_closed and self._extended.communicator is not None:\n",
        ("tests/strategies/test_closed.py",),
    ),
)

_TRAINING = (
    Fault(
        "an accumulator adds to the caller's own gradients",
        "mpidist/training/gradients.py",
        "            return copy_of(array)\n",
        "            return array\n",
        ("tests/training/test_gradients.py",),
    ),
    Fault(
        "a regularization loss counts once on each replica",
        "mpidist/training/losses.py",
        "total / get_strategy().num_replicas_in_sync",
        "total",
        ("tests/training/test_losses.py",),
    ),
    Fault(
        "gradients that are already sums are not compared between ranks",
        "mpidist/training/optimizer.py",
        "        self._agree_on_sums(strategy, lambda: code)\n",
        "",
        ("tests/training/test_same_on_all_ranks.py",),
        ranks=2,
    ),
    Fault(
        "an accumulator keeps the caller's arrays of sparse gradients",
        "mpidist/training/gradients.py",
        "kept = IndexedSlices(copy_of(gradient.values), copy_of(gradient.indices), gradient.dense_shape)",
        "kept = gradient",
        ("tests/training/test_gradients.py",),
    ),
)

_PARAMETER_SERVER = (
    Fault(
        "a server carries out a request that the worker has given up half sent",
        "mpidist/parameter_server/service.py",
        "if messages.GIVE_UP.unpack(number) == (client.requests,):",
        "if messages.GIVE_UP.unpack(number) == (client.requests - 1,):",
        ("tests/parameter_server/test_broken_off.py",),
    ),
    Fault(
        "functions that were queued when another failed are carried out",
        "mpidist/parameter_server/dispatcher.py",
        "            self._error = self._error or error\n            self._cancel_queue()\n",
        "            self._error = self._error or error\n",
        ("tests/parameter_server/test_scheduled_errors.py",),
    ),
    Fault(
        "closing a strategy releases the servers",
        "mpidist/parameter_server/parameter_server_extended.py",
        "            self._link.close(self.number)\n",
        "            self._link.leave()\n",
        ("tests/parameter_server/test_coordinator_lifetime.py",),
    ),
    Fault(
        "a worker executes functions of all strategies in the scope of the first",
        "mpidist/parameter_server/server.py",
        "        names = self._names_of(strategy)\n        self._definitions",
        "        names = self._names_of(0)\n        self._definitions",
        ("tests/parameter_server/test_coordinator_lifetime.py",),
    ),
    Fault(
        "others wait for a worker that closed its strategy without creating a variable",
        "mpidist/parameter_server/store.py",
        "return client not in self.clients or (strategy, client) in self._closed",
        "return client not in self.clients",
        ("tests/parameter_server/test_v1.py",),
    ),
)

_CHECKPOINT = (
    Fault(
        "a manifest is read without a look at its checksum",
        "mpidist/checkpoint/formats.py",
        "            if found != expected:",
        "            if not expected:",
        ("tests/checkpoint/test_damage.py",),
    ),
    Fault(
        "a thread writes arrays that the program changes meanwhile",
        "mpidist/checkpoint/checkpoint.py",
        "needs_copy = copied is array",
        "needs_copy = False",
        ("tests/checkpoint/test_async.py",),
    ),
    Fault(
        "one checkpoint too few is kept",
        "mpidist/checkpoint/manager.py",
        "max(0, len(saved_at) - self._max_to_keep)",
        "max(0, len(saved_at) - max(1, self._max_to_keep - 1))",
        ("tests/checkpoint/test_manager.py",),
    ),
    Fault(
        "the iterator's state is accepted without a check",
        "mpidist/checkpoint/restoring.py",
        "                check(aligned.values[key])\n",
        "                pass\n",
        ("tests/checkpoint/test_contents.py",),
    ),
)

_ELASTIC = (
    Fault(
        "the ranks go on from the first rank's commit where another has a newer one",
        "mpidist/elastic/state.py",
        "holder = numbers.index(newest)",
        "holder = 0",
        ("tests/elastic/test_state.py",),
    ),
    Fault(
        "variables made anew do not get the values of the last commit",
        "mpidist/elastic/state.py",
        "        restore_snapshot(tracked, self._last.snapshot)\n",
        "",
        ("tests/elastic/test_run.py",),
    ),
    Fault(
        "only the objects of the first commit are compared between ranks",
        "mpidist/elastic/state.py",
        "        if described != self._agreed:\n",
        "        if not self._agreed:\n",
        ("tests/elastic/test_state.py",),
    ),
    Fault(
        "a commit keeps the program's own arrays",
        "mpidist/elastic/state.py",
        "arrays.update({key: np.array(on_host(array)) for key, array in leaves.arrays.items()})",
        "arrays.update({key: on_host(array) for key, array in leaves.arrays.items()})",
        ("tests/elastic/test_run.py",),
    ),
)

_ESTIMATOR = (
    Fault(
        "evaluations follow one another without a pause",
        "mpidist/estimator/evaluations.py",
        "self._next_evaluation = begin + self._spec.throttle_secs",
        "self._next_evaluation = begin",
        ("tests/estimator/test_evaluations.py",),
    ),
    Fault(
        "the first rank that trains is taken for the chief",
        "mpidist/estimator/roles.py",
        "chief = min(trainers, key=lambda number: tasks[number])",
        "chief = trainers[0]",
        ("tests/estimator/test_cast.py",),
    ),
    Fault(
        "the last evaluation does not wait for the checkpoint that the chief has saved",
        "mpidist/estimator/evaluations.py",
        "        if told is not None:\n            self._await(told)\n",
        "",
        ("tests/estimator/test_evaluations.py",),
    ),
    Fault(
        "an evaluation whose checkpoint was removed holds the next one back",
        "mpidist/estimator/evaluations.py",
        "            self._next_look = self._next_evaluation = begin\n",
        "",
        ("tests/estimator/test_evaluations.py",),
    ),
)

_COMPAT = (
    Fault(
        "workers are numbered as if there were no chief",
        "mpidist/compat/multi_worker_util.py",
        'return task_id + (task_count(spec, "chief") if task_type == "worker" else 0)',
        "return task_id",
        ("tests/compat/test_multi_worker_util.py",),
    ),
    Fault(
        "an iterator that is initialized again goes on where it was",
        "mpidist/compat/v1_strategies.py",
        "        self._iterator = iter(self._dataset)\n",
        "        self._iterator = self._iterator or iter(self._dataset)\n",
        ("tests/compat/test_v1_iterators.py",),
    ),
    Fault(
        "the first worker is the chief of a cluster that has a chief",
        "mpidist/compat/multi_worker_util.py",
        'return task_type == "worker" and task_id == 0 and "chief" not in spec.jobs',
        'return task_type == "worker" and task_id == 0',
        ("tests/compat/test_multi_worker_util.py",),
    ),
    Fault(
        "a smaller last batch is refused if the size of the batches is not known beforehand",
        "mpidist/compat/v1_strategies.py",
        "            whole = max(whole, rows)\n",
        "",
        ("tests/compat/test_v1_iterators.py",),
    ),
)

# Of the parts that tests see without torch, which is not in their environment.
_TORCH = (
    Fault(
        "a rank on its node is told as one among all",
        "mpidist/torch/variables.py",
        "LOCAL_RANK=info.local_rank,",
        "LOCAL_RANK=info.rank,",
        ("tests/torch/test_launchers.py",),
    ),
    Fault(
        "a place that the program was given is mixed with the launcher's",
        "mpidist/torch/variables.py",
        'if info is None or info.size is None or "RANK" in os.environ or "WORLD_SIZE" in os.environ:',
        "if info is None or info.size is None:",
        ("tests/torch/test_launchers.py",),
    ),
    Fault(
        "a WORLD_SIZE that mpidist has set is taken for that of another launcher",
        "mpidist/torch/variables.py",
        'if name in ("WORLD_SIZE", "MASTER_ADDR"):',
        'if name == "MASTER_ADDR":',
        ("tests/topology/test_start.py",),
    ),
    Fault(
        "a number that the launcher does not give is set as None",
        "mpidist/torch/variables.py",
        "if value is None or name in os.environ:",
        "if name in os.environ:",
        ("tests/torch/test_launchers.py",),
    ),
)

_JAX = (
    Fault(
        "leaves behind the first one are cut from the beginning",
        "mpidist/jax/leaf_packs.py",
        "                start = stop\n",
        "                start = 0\n",
        ("tests/jax/test_leaf_packs.py",),
    ),
    Fault(
        "leaves of all dtypes are in one pack",
        "mpidist/jax/leaf_packs.py",
        "of_dtype.setdefault(leaf.dtype, [])",
        "of_dtype.setdefault(None, [])",
        ("tests/jax/test_leaf_packs.py",),
    ),
    Fault(
        "leaves come back without their shapes",
        "mpidist/jax/leaf_packs.py",
        "pack[start:stop].reshape(self._shapes[index])",
        "pack[start:stop]",
        ("tests/jax/test_leaf_packs.py",),
    ),
)

# Of the part that tests see without Keras.
_KERAS = (
    Fault(
        "rows of a rank's second replica are left out",
        "mpidist/keras/shares.py",
        "of_replicas[end - 1][1])",
        "of_replicas[first][1])",
        ("tests/keras/test_shares.py",),
    ),
    Fault(
        "predictions come in the order of ranks",
        "mpidist/keras/shares.py",
        "    return np.argsort(np.concatenate(of_ranks))",
        "    return np.arange(len(np.concatenate(of_ranks)))",
        ("tests/keras/test_shares.py",),
    ),
    Fault(
        "a batch in which a rank has no rows has no output there",
        "mpidist/keras/shares.py",
        "np.full(max(stop - start, 1), stop > start)",
        "np.full(stop - start, True)",
        ("tests/keras/test_shares.py",),
    ),
    Fault(
        "the rows of a batch are counted from its end",
        "mpidist/keras/shares.py",
        "np.arange(start, stop) + end - size",
        "np.arange(start, stop) + end",
        ("tests/keras/test_shares.py",),
    ),
)

_CLI = (
    Fault(
        "launch replaces what the user has set",
        "mpidist/cli/launch.py",
        "for name, value in wanted.items() if name not in os.environ}",
        "for name, value in wanted.items()}",
        ("tests/cli/test_launch.py",),
    ),
    Fault(
        "doctor ends with status 0 although it has found something",
        "mpidist/cli/doctor.py",
        "    return _FOUND_SOMETHING if found else 0",
        "    return 0",
        ("tests/cli/test_doctor.py",),
    ),
    Fault(
        "the second value of an option is taken for the program",
        "mpidist/cli/launch.py",
        "    if option in _TWO_VALUES:\n        return 2\n",
        "    if option in _TWO_VALUES:\n        return 1\n",
        ("tests/cli/test_launch.py",),
    ),
    Fault(
        "a document of facts has no version",
        "mpidist/cli/json_output.py",
        'json.dumps({"mpidist": __version__, **facts}, indent=2)',
        "json.dumps({**facts}, indent=2)",
        ("tests/cli/test_json_output.py",),
    ),
)

_FACADES_FAULTS = (
    Fault(
        "the v1 name of a strategy is that of v2",
        "mpidist/v1/experimental.py",
        "from mpidist.compat.v1_strategies import CentralStorageStrategyV1 as CentralStorageStrategy",
        "from mpidist.strategies import CentralStorageStrategy",
        ("tests/strategies/test_central_storage.py",),
    ),
    Fault(
        "a public name of the v1 module is missing",
        "mpidist/v1/__init__.py",
        "    get_loss_reduction,\n",
        "",
        ("tests/acceptance/test_enums_and_options.py",),
    ),
    Fault(
        "AdamW is Adam",
        "mpidist/optimizers.py",
        "import SGD, Adam, AdamW, Optimizer, RMSprop\n",
        "import SGD, Adam, Optimizer, RMSprop\n\nAdamW = Adam\n",
        ("tests/training/test_optimizers.py",),
    ),
    Fault(
        "a public name of the experimental module is that of another module",
        "mpidist/experimental/__init__.py",
        '"mpidist.parameter_server.remote": "cache_variable_reads"',
        '"mpidist.parameter_server.remote_value": "cache_variable_reads"',
        ("tests/acceptance/test_public_paths.py",),
    ),
)

FAULTS: tuple[Fault, ...] = (
    *_NATIVE,
    *_CORE,
    *_ARRAYS,
    *_TOPOLOGY,
    *_CLUSTER_RESOLVER,
    *_COLLECTIVES,
    *_VALUES,
    *_CROSS_DEVICE_OPS,
    *_INPUT,
    *_STRATEGIES,
    *_TRAINING,
    *_PARAMETER_SERVER,
    *_CHECKPOINT,
    *_ELASTIC,
    *_ESTIMATOR,
    *_COMPAT,
    *_TORCH,
    *_JAX,
    *_KERAS,
    *_CLI,
    *_FACADES_FAULTS,
)
"""By room, from the lowest to the highest."""
