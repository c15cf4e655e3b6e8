"""Keeps torch.compile out of the process group, and detects compiled code."""

from __future__ import annotations

import torch
from torch._C._dynamo import eval_frame


def keep_compiler_out(kind: type) -> None:
    """Let the compiler skip the methods of a class, and all functions that they call."""
    # torch.compiler.disable would import the compiler, which takes a second, in programs that never compile.
    if not hasattr(eval_frame, "set_code_exec_strategy"):
        return
    skip = eval_frame._FrameAction.SKIP
    for method in vars(kind).values():
        if hasattr(method, "__code__"):
            eval_frame.set_code_exec_strategy(method.__code__, eval_frame._FrameExecStrategy(skip, skip))


def is_compiled() -> bool:
    """Return whether torch.compile traces or has compiled the caller."""
    return torch.compiler.is_compiling() or callable(eval_frame.get_eval_frame_callback())
