"""Keeps torch.compile out of the process group, and tells where it is at work."""

from __future__ import annotations

import torch

from mpidist.torch.foreign import Foreign

# torch.compiler.disable would import the compiler, which takes a second, in programs that never compile.
_frames: Foreign = torch._C._dynamo.eval_frame


def keep_compiler_out(kind: type) -> None:
    """Have the compiler skip the methods of a class, and all that they call.

    Only where this torch can be told so.
    """
    if not hasattr(_frames, "set_code_exec_strategy"):
        return
    skip = _frames._FrameAction.SKIP
    for method in vars(kind).values():
        if hasattr(method, "__code__"):
            _frames.set_code_exec_strategy(method.__code__, _frames._FrameExecStrategy(skip, skip))


def is_compiled() -> bool:
    """Return whether the caller is traced by torch.compile, or called by what it has made."""
    return torch.compiler.is_compiling() or callable(_frames.get_eval_frame_callback())
