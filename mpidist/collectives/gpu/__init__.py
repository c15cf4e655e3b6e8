"""Arrays on GPUs: NCCL, streams, staging in host memory, and the algorithms."""
