"""The tags of mpidist's messages point to point; every MPI allows those up to 32767."""

from __future__ import annotations

# On the communicator of a channel. Those of arrays are counted, and begin anew after the last.
TAGS_OF_ARRAYS = LEADERS = (1 << 14) - 1
# Those of programs have a tag of their own, twice.
TAGS_OF_PROGRAMS = 8190
HEADS_OF_PROGRAMS, DATA_OF_PROGRAMS = LEADERS + 1, LEADERS + 1 + TAGS_OF_PROGRAMS
PARTS, CONNECTIONS, SERVICE, NCCL_START = range(32764, 32768)
# Of the making of a communicator, which are no messages of it.
GROUPS = 1
# On the private duplicate of the world.
TALLIES = 0x7ACE
# On that of the ranks of train_and_evaluate.
ROLES = 1
# On that of workers and parameter servers.
REQUEST, REQUEST_DATA, REPLY, REPLY_DATA, GIVE_UP, TO_WORKER, FROM_WORKER = range(1, 8)
# On that of the store of torch.distributed.
TORCH_STORE = 1
# On the world itself, of ranks that make no communicator, and of doctor.
ROLL_CALL, ROLL_CALL_ANSWER = range(7106, 7108)
DOCTOR_LENGTH, DOCTOR_CONTENT, DOCTOR_VERDICT, DOCTOR_HELLO, DOCTOR_PING = range(7101, 7106)
