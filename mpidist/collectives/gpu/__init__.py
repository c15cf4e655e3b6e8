"""Arrays on GPUs: NCCL and its start, streams, staging in host memory, and the algorithms on the device."""
