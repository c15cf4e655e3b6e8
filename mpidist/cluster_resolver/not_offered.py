"""Resolvers that ask a cloud's servers, which mpidist does not offer.

Their errors name the alternatives.
"""

from __future__ import annotations

from typing import NoReturn

from mpidist.cluster_resolver.cluster_resolver import ClusterResolver


class _NotOffered(ClusterResolver):
    """A resolver that cannot be made."""

    _asks = ""

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"mpidist does not offer {cls.__name__}, which asks {cls._asks} who takes part: here MPI knows. "
            "Expected: the ranks are started by an MPI launcher, and the resolver is MPIClusterResolver(), the "
            "default; or type: SimpleClusterResolver(ClusterSpec({'worker': ['host0:1', 'host1:1']}), ...)"
        )


class KubernetesClusterResolver(_NotOffered):
    """Not offered: raises NotImplementedError, which names alternatives.

    On Kubernetes the MPI operator starts ranks.
    """

    _asks = "a Kubernetes server"


class GCEClusterResolver(_NotOffered):
    """Not offered: raises NotImplementedError, which names alternatives."""

    _asks = "Google Compute Engine"


class TPUClusterResolver(_NotOffered):
    """Not offered: raises NotImplementedError, which names alternatives. There is no support for TPUs."""

    _asks = "Google Cloud's TPU service"


class SageMakerClusterResolver(_NotOffered):
    """Not offered: raises NotImplementedError, which names alternatives. SageMaker has an MPI launcher of its own."""

    _asks = "SageMaker's variables SM_HOSTS and SM_CURRENT_HOST"
