"""The order of JAX's computations and of the collectives in them, on CPUs.

By default JAX only notes a computation, and another thread carries it out. Collectives in it would come at any time
between those of the program, in another order on each rank. So JAX is told to carry computations out at once.
"""

from __future__ import annotations

from typing import Any

import jax

# JAX gives it no types.
_config: Any = jax.config
_ASYNC = "jax_cpu_enable_async_dispatch"


def has_started() -> bool:
    """Return whether JAX has looked for its devices, after which some settings are fixed."""
    # There is no question for it in public, but a setting that can be changed before that alone.
    before = _config.jax_num_cpu_devices
    try:
        _config.update("jax_num_cpu_devices", before + 1)
    except RuntimeError:
        return True
    _config.update("jax_num_cpu_devices", before)
    return False


class _Dispatch:
    """Whether computations on CPUs are carried out where they are called."""

    is_in_order = False


def dispatch_in_order() -> None:
    """Have JAX compute on CPUs where it is called, unless it has started."""
    if _config.read(_ASYNC) and not has_started():
        _config.update(_ASYNC, False)
    _Dispatch.is_in_order = not _config.read(_ASYNC)


def check_order() -> None:
    """Raise RuntimeError where a collective in a jitted function would come out of order."""
    if jax.default_backend() != "cpu":
        raise RuntimeError(
            f"mpidist.jax.all_reduce in a jitted function, on {jax.default_backend()}: JAX carries it out at any time "
            "there; call it between two jitted functions"
        )
    if not _Dispatch.is_in_order:
        raise RuntimeError(
            "mpidist.jax.all_reduce in a jitted function: JAX had started before mpidist.jax was imported, and carries "
            "functions out at any time; import mpidist.jax before anything is computed, or set "
            "JAX_CPU_ENABLE_ASYNC_DISPATCH=0"
        )
