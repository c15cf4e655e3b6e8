"""Modules of PyTorch under a strategy: a copy for each replica, equal at the start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn, TypeAlias

import torch

from mpidist.arrays.dtypes import Array
from mpidist.core.context import get_replica_context, get_strategy, has_strategy, in_cross_replica_context
from mpidist.strategies import Strategy, check_adopts_in_scope
from mpidist.strategies.central_storage import CentralStorageExtended
from mpidist.torch.compiling import is_compiled
from mpidist.torch.foreign import Foreign
from mpidist.torch.step_checks import adopted
from mpidist.torch.tensors import array_of, fill

if TYPE_CHECKING:
    from torch import Tensor

_Module: Foreign = torch.nn.Module
ModuleOrFactory: TypeAlias = Callable[..., Foreign]


def adopt(module: ModuleOrFactory) -> ReplicatedModule:
    """Return a module that has a copy for each replica of the current strategy (collective).

    Parameters and buffers are those of the first rank. Inside ``strategy.run`` each replica uses its own copy, which an
    ``mpidist.torch.Optimizer`` keeps equal to the others. Call it inside ``with strategy.scope():``.

    Args:
        module: A module, which becomes the first replica's copy, or a function or class that makes one.

    Raises:
        TypeError: Neither a module nor a function that returns one.
        RuntimeError: Called inside ``strategy.run``, or outside of the scope although a strategy has several ranks.
        ValueError: A strategy without replicas in sync, or one of GPUs; a module whose copies have other names.
        MismatchError: Modules of other shapes on other ranks.
        NotImplementedError: A compiled module for several replicas of one rank.

    >>> import mpidist, torch
    >>> with mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=None).scope():
    ...     model = adopt(torch.nn.Linear(3, 2))
    >>> len(model.copies), tuple(model.weight.shape)
    (2, (2, 3))
    """
    check_adopts_in_scope("mpidist.torch.adopt()")
    strategy: Foreign = get_strategy()
    if has_strategy() and not in_cross_replica_context():
        raise RuntimeError(
            "adopt() was called inside strategy.run(), where every replica would have other copies; call it once, "
            "before, inside `with strategy.scope():`"
        )
    extended = strategy.extended
    with extended.shared_errors("adopt()"):
        check_strategy(strategy)
        first = module if isinstance(module, _Module) else _made(module)
        if isinstance(first, ReplicatedModule):
            raise TypeError("adopt() was given what adopt() has returned; expected a module of PyTorch")
        copies = [first]
        if len(extended.local_replica_ids) > 1:
            _check_not_compiled(first)
    _take_first_ranks(strategy, first, "adopt()")
    with extended.shared_errors("adopt()"):
        # After the values have come: what is derived from them is copied as it is.
        copies += [copy.deepcopy(first) for _ in extended.local_replica_ids[1:]]
        _check_names(copies)
    return ReplicatedModule(strategy, copies)


def _check_names(copies: list[Foreign]) -> None:
    names = [[*_tensors_of(module)] for module in copies]
    if any(other != names[0] for other in names):
        raise ValueError(
            f"{type(copies[0]).__name__} gives its copies parameters of other names, as Keras models do; expected one "
            "replica per rank (mpirun -n N, without devices=), for a Keras model mpidist.keras.adopt(model) and fit()"
        )


def _take_first_ranks(strategy: Strategy, module: Foreign, name: str) -> None:
    """Give a module the parameters and buffers of the first rank (collective)."""
    tensors = _tensors_of(module)
    note = f"{name} of {type(module).__name__}: " + ", ".join(
        f"{name} {tensor.dtype}{list(tensor.shape)}" for name, tensor in tensors.items()
    )
    sent = strategy.extended.broadcast([array_of(tensor) for tensor in tensors.values()], 0, note) if tensors else []
    with torch.no_grad():
        for tensor, array in zip(tensors.values(), sent, strict=True):
            fill(tensor, array)


def _made(factory: ModuleOrFactory) -> Foreign:
    if not callable(factory):
        raise TypeError(
            f"adopt() was given {factory!r}; expected a torch.nn.Module, or a class or function that makes one, as in "
            "mpidist.torch.adopt(Net)"
        )
    module = factory()
    if not isinstance(module, _Module):
        raise TypeError(f"{factory!r} made {module!r} of type {type(module).__name__}; expected a torch.nn.Module")
    return module


def check_strategy(strategy: Strategy) -> None:
    """Raise ValueError for a strategy whose replicas cannot have modules."""
    name, extended = type(strategy).__name__, strategy.extended
    if extended.is_central and not isinstance(extended, CentralStorageExtended):
        raise ValueError(
            f"{name} keeps variables on parameter servers, which change them whenever a worker sends a gradient, and a "
            "module of PyTorch computes with parameters of its own, which no server reaches; expected a strategy whose "
            "replicas step together: mpidist.MultiWorkerMirroredStrategy()"
        )
    if extended.first_gpu is not None:
        raise ValueError(
            f"{name} has the devices {list(extended.worker_devices)}, and modules are adopted in host memory; expected "
            "CPUs, as in mpidist.MultiWorkerMirroredStrategy(devices=['cpu:0']); on GPUs DistributedDataParallel runs "
            'over torch.distributed.init_process_group("mpidist")'
        )


def _check_not_compiled(module: Foreign) -> None:
    """Raise NotImplementedError for a module that torch.compile has made."""
    compiled = [
        name or "the module"
        for name, inner in module.named_modules()
        # Kept apart from the module's state, so that only these two say so.
        if hasattr(inner, "_orig_mod") or getattr(inner, "_compiled_call_impl", None) is not None
    ]
    if compiled:
        raise several_compiled(f"adopt() was given a module that torch.compile has made ({compiled[0]})")


def several_compiled(beginning: str) -> NotImplementedError:
    """Return the error for compiled code of several replicas of one rank.

    Args:
        beginning: Of the message.
    """
    return NotImplementedError(
        f"{beginning}, and this rank has several replicas, which run in threads: torch.compile keeps one state for the "
        "process. Expected one replica per rank: give the strategy one device, and type mpirun -n 4 python train.py; "
        "or leave torch.compile out"
    )


def _tensors_of(module: Foreign) -> dict[str, Tensor]:
    """Return parameters and buffers by name, those that state_dict leaves out as well."""
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return tensors


def _too_late(method: str, name: str) -> TypeError:
    return TypeError(
        f"{method}({name!r}, ...) was called on a module that mpidist.torch.adopt has returned, whose copies would not "
        f"get it; call it on the module before: module.{method}({name!r}, ...); model = mpidist.torch.adopt(module)"
    )


class ReplicatedModule(_Module):  # type: ignore[misc, unused-ignore]
    """A module with a copy for each replica of this rank; made by :func:`adopt`.

    Inside ``strategy.run`` it stands for the replica's own copy, outside for the first one: calls, attributes,
    parameters, ``state_dict``. A change outside of ``run`` is one of all copies: ``train``, ``eval``,
    ``requires_grad_``, ``load_state_dict``, ``to``, ``apply``, ``zero_grad`` and attributes that are set. Changes of
    its parts, as ``torch.nn.init`` of ``model.weight`` or ``model.body.eval()``, are made before :func:`adopt`.

    Args:
        strategy: The strategy of the replicas.
        copies: A module for each replica of this rank.

    Attributes:
        copies: The modules.
        strategy: The strategy.
        optimizers: Those that sum gradients of the copies.
    """

    def __init__(self, strategy: Strategy, copies: list[Foreign]) -> None:
        super().__init__()
        # A question to the copies.
        del self.__dict__["training"]
        # Not as attributes of a module, which would make submodules of the copies.
        self.__dict__.update(strategy=strategy, copies=tuple(copies), optimizers=[])
        adopted.add(self)

    @property
    def here(self) -> Foreign:
        """The copy of the replica that runs; outside of ``run`` the first one."""
        context = get_replica_context()
        if context is None or context.strategy is not self.strategy:
            return self.copies[0]
        return self.copies[context.local_replica_id]

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy of the replicas."""
        strategy: Strategy = self.strategy
        return strategy

    def changed(self) -> tuple[Foreign, ...]:
        """Return the copies that a change is for: in a replica its own, outside all."""
        context = get_replica_context()
        if context is None or context.strategy is not self.strategy:
            return tuple(self.copies)
        return (self.copies[context.local_replica_id],)

    def forward(self, *args: object, **kwargs: object) -> Foreign:
        """Call the copy of this replica."""
        if len(self.copies) > 1 and is_compiled():
            raise several_compiled("torch.compile has come to a module that mpidist has adopted")
        return self.here(*args, **kwargs)

    # Questions, to the copy of this replica -------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Foreign:
        if "copies" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.here, name)

    def __getitem__(self, index: object) -> Foreign:
        return self.here[index]

    def named_modules(self, *args: object, **kwargs: object) -> Foreign:
        """Yield the modules in the copy, with their names."""
        return self.here.named_modules(*args, **kwargs)

    def named_children(self) -> Foreign:
        """Yield the modules directly in the copy, with their names."""
        return self.here.named_children()

    def named_parameters(self, *args: object, **kwargs: object) -> Foreign:
        """Yield the parameters of the copy, with their names."""
        return self.here.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: object, **kwargs: object) -> Foreign:
        """Yield the buffers of the copy, with their names."""
        return self.here.named_buffers(*args, **kwargs)

    def get_submodule(self, target: str) -> Foreign:
        """Return a module in the copy by its name."""
        return self.here.get_submodule(target)

    def state_dict(self, *args: object, **kwargs: object) -> Foreign:
        """Return parameters and buffers of the copy by name."""
        return self.here.state_dict(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<ReplicatedModule with {len(self.copies)} of {self.strategy.num_replicas_in_sync} copies: {self.here}>"

    # Changes, of all copies outside of replicas ---------------------------------------------------------------------

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
            return
        copies = self.changed()
        if len(copies) > 1 and isinstance(value, (_Module, torch.Tensor)):
            raise TypeError(
                f"attribute {name!r} was set to a {type(value).__name__}, which the {len(copies)} copies would share; "
                "set it on the module before mpidist.torch.adopt(module)"
            )
        for module in copies:
            setattr(module, name, value)

    def train(self, mode: bool = True) -> ReplicatedModule:
        """Set the copies to training, or with False to evaluation."""
        for module in self.changed():
            module.train(mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> ReplicatedModule:
        """Say of all parameters whether they have gradients."""
        for module in self.changed():
            module.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for module in self.changed():
            module.zero_grad(set_to_none)

    def apply(self, fn: Callable[[Foreign], None]) -> ReplicatedModule:
        """Call a function with each module of each copy.

        Outside of replicas the copies are equal afterwards.
        """
        copies = self.changed()
        for module in copies:
            module.apply(fn)
        if len(copies) > 1:
            # A function that draws numbers draws others for each copy.
            self.make_equal()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ReplicatedModule:
        # By which torch's own methods change dtypes and memory: type, to_empty, share_memory.
        for module in self.changed():
            module._apply(fn, recurse)
        return self

    def load_state_dict(self, *args: object, **kwargs: object) -> Foreign:
        """Give the copies parameters and buffers by name."""
        first, *_ = [module.load_state_dict(*args, **kwargs) for module in self.changed()]
        return first

    def to(self, *args: object, **kwargs: object) -> ReplicatedModule:
        """Give the copies another dtype, or order in memory."""
        for module in self.changed():
            module.to(*args, **kwargs)
        return self

    def double(self) -> ReplicatedModule:
        """Give the copies float64."""
        return self.to(torch.float64)

    def float(self) -> ReplicatedModule:
        """Give the copies float32."""
        return self.to(torch.float32)

    def half(self) -> ReplicatedModule:
        """Give the copies float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> ReplicatedModule:
        """Give the copies bfloat16."""
        return self.to(torch.bfloat16)

    def compile(self, *args: object, **kwargs: object) -> None:
        """Have torch.compile make the copy's calls faster.

        With several replicas on this rank it is an error.
        """
        if len(self.copies) > 1:
            raise several_compiled("compile() of a module that mpidist has adopted was called")
        self.copies[0].compile(*args, **kwargs)

    def register_buffer(self, name: str, *args: object, **kwargs: object) -> NoReturn:
        """Raise TypeError: parts are those of the copies."""
        raise _too_late("register_buffer", name)

    def register_parameter(self, name: str, *args: object, **kwargs: object) -> NoReturn:
        """Raise TypeError: parts are those of the copies."""
        raise _too_late("register_parameter", name)

    def register_module(self, name: str, *args: object, **kwargs: object) -> NoReturn:
        """Raise TypeError: parts are those of the copies."""
        raise _too_late("register_module", name)

    def add_module(self, name: str, *args: object, **kwargs: object) -> NoReturn:
        """Raise TypeError: parts are those of the copies."""
        raise _too_late("add_module", name)

    # Copies of it ---------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, object]) -> Foreign:
        """Return a copy of this replica's module, which is not adopted."""
        return copy.deepcopy(self.here, memo)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a module that mpidist.torch.adopt has returned cannot be pickled, as it has a strategy; save "
            "model.state_dict(), as in torch.save(model.state_dict(), path), or use mpidist.Checkpoint(model=model)"
        )

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def _checkpoint_children(self) -> dict[str, object]:
        return dict(self.copies[0].state_dict())

    def _checkpoint_defer(self, values: dict[str, Array]) -> None:
        # The first copy has its values by now; nothing is taken, as a module makes no parts later.
        del values
        self.make_equal()

    def make_equal_on_ranks(self, name: str) -> None:
        """Give all copies the parameters and buffers of the first rank's first copy (collective).

        Args:
            name: Of the call, for errors.

        Raises:
            ValueError: Copies of this rank differ in which parameters have gradients.
            MismatchError: Modules of other shapes on other ranks.
        """
        first = {name: parameter.requires_grad for name, parameter in self.copies[0].named_parameters()}
        with self.strategy.extended.shared_errors(name):
            for module in self.copies[1:]:
                found = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
                if found != first:
                    differing = sorted(key for key, _ in found.items() ^ first.items())
                    raise ValueError(
                        f"copies of the module differ in which parameters have gradients: {differing[0]}; call "
                        "model.requires_grad_() outside of strategy.run(), or of a part of the module before "
                        "mpidist.torch.adopt(module)"
                    )
        _take_first_ranks(self.strategy, self.copies[0], name)
        self.make_equal()

    def make_equal(self) -> None:
        """Give all copies the parameters and buffers of the first."""
        first = _tensors_of(self.copies[0])
        with torch.no_grad():
            for module in self.copies[1:]:
                for name, tensor in _tensors_of(module).items():
                    tensor.copy_(first[name])
