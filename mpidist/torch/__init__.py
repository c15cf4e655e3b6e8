"""PyTorch over MPI: ``init_process_group("mpidist")``, and modules under a strategy.

``mpidist_torch_entry`` beside the package registers the process group when torch is imported. Names are
imported on first use: ``import mpidist`` does not import torch.
"""

from typing import TYPE_CHECKING

from mpidist.core.lazy import on_first_use

if TYPE_CHECKING:
    from mpidist.torch.batch_norm import SyncBatchNorm
    from mpidist.torch.modules import ReplicatedModule, adopt
    from mpidist.torch.replicated_optimizer import Optimizer
    from mpidist.torch.step_checks import independent
else:
    __getattr__, __dir__ = on_first_use(
        __name__,
        {
            "mpidist.torch.batch_norm": "SyncBatchNorm",
            "mpidist.torch.step_checks": "independent",
            "mpidist.torch.modules": "ReplicatedModule adopt",
            "mpidist.torch.replicated_optimizer": "Optimizer",
        },
    )

del TYPE_CHECKING, on_first_use

__all__ = ["Optimizer", "ReplicatedModule", "SyncBatchNorm", "adopt", "independent"]
