"""Tags of point-to-point messages. Every MPI allows tags up to 32767."""

from __future__ import annotations

# On the communicator of a channel. Tags of arrays are counted, and restart after the last.
TAGS_OF_ARRAYS = LEADERS = (1 << 14) - 1
# Messages of programs: each of the program's tags has one tag for heads, and one for data.
TAGS_OF_PROGRAMS = 8190
HEADS_OF_PROGRAMS, DATA_OF_PROGRAMS = LEADERS + 1, LEADERS + 1 + TAGS_OF_PROGRAMS
PARTS, CONNECTIONS, SERVICE, NCCL_START = range(32764, 32768)
# For MPI_Comm_create_group.
GROUPS = 1
# On the private duplicate of the world.
TALLIES = 0x7ACE
# On the duplicate of the ranks of train_and_evaluate.
ROLES = 1
# On the duplicate of workers and parameter servers.
REQUEST, REQUEST_DATA, REPLY, REPLY_DATA, GIVE_UP, TO_WORKER, FROM_WORKER = range(1, 8)
# On the duplicate of the store of torch.distributed.
TORCH_STORE = 1
# On the world itself: ranks without a communicator, and doctor.
ROLL_CALL, ROLL_CALL_ANSWER = range(7106, 7108)
DOCTOR_REPORT, DOCTOR_VERDICT, DOCTOR_HELLO, DOCTOR_PING = range(7102, 7106)
