"""BatchNorm over the rows of all replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.function import once_differentiable

from mpidist.core.context import ReplicaContextLike, get_replica_context, has_strategy
from mpidist.core.options import ReduceOp

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd.function import FunctionCtx

_KINDS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


class SyncBatchNorm(torch.nn.BatchNorm1d):  # type: ignore[misc, unused-ignore]
    """BatchNorm with mean and variance of the rows of all replicas.

    The results equal those of one process with the global batch. Inputs may be rows, images or volumes.

    In training inside ``strategy.run``, forward and backward are collective: every replica must call both, also one
    without rows. Elsewhere, and in evaluation, it works like ``torch.nn.BatchNorm2d``.

    Args:
        num_features: Channels, along axis 1.
        eps, momentum, affine, track_running_stats: As in ``torch.nn.BatchNorm2d``.

    Raises:
        ValueError: All replicas together have one value per channel, or an input has fewer than two axes.

    >>> import torch
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
    >>> type(SyncBatchNorm.convert_sync_batchnorm(net)[1]).__name__
    'SyncBatchNorm'
    """

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Replace each BatchNorm layer of a module by a SyncBatchNorm, and return the module.

        Call it before ``adopt``, or in the function that creates the module.
        """
        if isinstance(module, _KINDS) and not isinstance(module, cls):
            layer = cls(module.num_features, module.eps, module.momentum, module.affine, module.track_running_stats)
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                setattr(layer, name, tensor)
            return layer.train(module.training)
        for name, inner in module.named_children():
            setattr(module, name, cls.convert_sync_batchnorm(inner))
        return module

    def _check_input_dim(self, given: Tensor) -> None:
        if given.dim() < 2:
            raise ValueError(f"The input of SyncBatchNorm has {given.dim()} axes. Pass (rows, channels, ...).")

    def forward(self, given: Tensor) -> Tensor:
        """Return the input with mean 0 and variance 1 in each channel, scaled and shifted."""
        self._check_input_dim(given)
        context = get_replica_context()
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or context is None or not has_strategy() or context.num_replicas_in_sync == 1:
            whole: Tensor = super().forward(given)
            return whole
        normal, mean, variance, count = _Normalized.apply(given, self.eps, context)
        if self.training and self.track_running_stats:
            with torch.no_grad():
                self._track(mean, variance, count)
        if not self.affine:
            of_all: Tensor = normal
            return of_all
        shape = [1, -1, *[1] * (given.dim() - 2)]
        return normal * self.weight.view(shape) + self.bias.view(shape)

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        unbiased = variance * (count / (count - 1))
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Normalized(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """The input, normalized by the mean and the variance of all replicas."""

    @staticmethod
    def forward(ctx: FunctionCtx, given: Tensor, eps: float, context: ReplicaContextLike) -> tuple[Tensor, ...]:
        wide = given if given.dtype == torch.float64 else given.float()
        axes = [axis for axis in range(given.dim()) if axis != 1]
        shape = [1, -1, *[1] * (given.dim() - 2)]
        rows = wide.numel() // max(1, wide.shape[1])
        # Mean first and then deviations from it: a difference of squares loses digits.
        sums = torch.cat([wide.sum(axes), wide.new_tensor([rows])])
        sums = context.all_reduce(ReduceOp.SUM, sums)
        mean, count = sums[:-1] / sums[-1], sums[-1]
        if count <= 1:
            raise ValueError(
                f"SyncBatchNorm got {int(count)} values per channel from all replicas. It needs at least 2 in training."
            )
        deviation = wide - mean.view(shape)
        variance = context.all_reduce(ReduceOp.SUM, deviation.square().sum(axes)) / count
        scale = (variance + eps).rsqrt()
        normal = deviation * scale.view(shape)
        ctx.save_for_backward(normal, scale, count)
        ctx.context, ctx.axes, ctx.shape = context, axes, shape
        ctx.mark_non_differentiable(mean, variance, count)
        return normal.to(given.dtype), mean, variance, count

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: FunctionCtx, upstream: Tensor, *_: object) -> tuple[Tensor, None, None]:
        normal, scale, count = ctx.saved_tensors
        wide = upstream.to(normal.dtype)
        both = torch.stack([wide.sum(ctx.axes), (wide * normal).sum(ctx.axes)])
        along, across = ctx.context.all_reduce(ReduceOp.SUM, both) / count
        gradient = wide - along.view(ctx.shape) - normal * across.view(ctx.shape)
        return (gradient * scale.view(ctx.shape)).to(upstream.dtype), None, None
