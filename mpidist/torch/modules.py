"""Modules of PyTorch under a strategy: a copy for each replica, equal at the start."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import torch
from torch.nn import Module

from mpidist.arrays.dtypes import Array
from mpidist.core.context import get_replica_context, get_strategy, has_strategy, in_cross_replica_context
from mpidist.core.options import ReduceOp
from mpidist.strategies import ReplicaContext, Strategy, check_adopts_in_scope
from mpidist.strategies.central_storage import CentralStorageExtended
from mpidist.torch.compiling import is_compiled
from mpidist.torch.step_checks import adopted
from mpidist.torch.tensors import array_of, fill

if TYPE_CHECKING:
    from torch import Tensor

ModuleOrFactory: TypeAlias = "Module | Callable[[], Module]"


def adopt(module: ModuleOrFactory) -> ReplicatedModule:
    """Return a module that has a copy for each replica of the current strategy (collective).

    Parameters and buffers are those of the first rank. Inside ``strategy.run`` each replica uses its own copy, which an
    ``mpidist.torch.Optimizer`` keeps equal to the others. Call it inside ``with strategy.scope():``.

    Args:
        module: A module, which becomes the first replica's copy, or a function or class that creates one.

    Raises:
        TypeError: Neither a module nor a function that returns one; a module with torch's SyncBatchNorm.
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
    strategy = cast("Strategy", get_strategy())
    if has_strategy() and not in_cross_replica_context():
        raise RuntimeError(
            "adopt() was called inside strategy.run(). Call it once, before, inside `with strategy.scope():`."
        )
    extended = strategy.extended
    with extended.shared_errors("adopt()"):
        check_strategy(strategy)
        first = module if isinstance(module, Module) else _made(module)
        _check_module(first, strategy)
    _copy_from_first_rank(strategy, first, "adopt()")
    with extended.shared_errors("adopt()"):
        # After the broadcast, so that derived values are copied, too.
        copies = [first, *[copy.deepcopy(first) for _ in extended.local_replica_ids[1:]]]
        names = [[*_tensors_of(each)] for each in copies]
        if any(other != names[0] for other in names):
            raise ValueError(
                f"{type(first).__name__} gives its copies parameters of other names, as Keras models do. Use one "
                "replica per rank (mpirun -n N, without devices=), or for a Keras model mpidist.keras.adopt(model)."
            )
    return ReplicatedModule(strategy, copies)


def _made(factory: Callable[[], Module]) -> Module:
    if not callable(factory):
        raise TypeError(
            f"adopt() was given {factory!r}. Pass a torch.nn.Module, or a class or function that creates one: "
            "mpidist.torch.adopt(Net)."
        )
    module = factory()
    if not isinstance(module, Module):
        raise TypeError(f"{factory!r} made {module!r} of type {type(module).__name__}, not a torch.nn.Module.")
    return module


def check_strategy(strategy: Strategy) -> None:
    """Raise ValueError for a strategy whose replicas cannot have modules."""
    name, extended = type(strategy).__name__, strategy.extended
    if extended.is_central and not isinstance(extended, CentralStorageExtended):
        raise ValueError(
            f"{name} keeps variables on parameter servers. A module of PyTorch has parameters of its own, which no "
            "server reaches. Use mpidist.MultiWorkerMirroredStrategy()."
        )
    if extended.first_gpu is not None:
        raise ValueError(
            f"{name} has the devices {list(extended.worker_devices)}, but modules are adopted in host memory. Use "
            "mpidist.MultiWorkerMirroredStrategy(devices=['cpu:0']), or on GPUs DistributedDataParallel over "
            'torch.distributed.init_process_group("mpidist").'
        )


def _check_module(module: Module, strategy: Strategy) -> None:
    if isinstance(module, ReplicatedModule):
        raise TypeError("The module is what adopt() has returned. Pass a module of PyTorch.")
    inner = dict(module.named_modules())
    if strategy.num_replicas_in_sync > 1:
        for name, each in inner.items():
            if isinstance(each, torch.nn.SyncBatchNorm):
                raise TypeError(
                    f"Layer {name!r} is a torch.nn.SyncBatchNorm, which synchronizes a process group, not the "
                    "replicas. Use mpidist.torch.SyncBatchNorm.convert_sync_batchnorm(module) with torch.nn.BatchNorm "
                    "layers."
                )
    if len(strategy.extended.local_replica_ids) > 1:
        for name, each in inner.items():
            # Attributes that only torch.compile sets.
            if hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) is not None:
                name = name or "the module"
                raise _several_compiled(f"adopt() was given a module that torch.compile has made ({name})")


def _several_compiled(problem: str) -> NotImplementedError:
    return NotImplementedError(
        f"{problem}, and this rank has several replicas, which run in threads. torch.compile keeps one state for the "
        "process. Use one replica per rank (one device, and mpirun -n 4 python train.py), or no torch.compile."
    )


def _tensors_of(module: Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, including those that state_dict omits."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _copy_from_first_rank(strategy: Strategy, module: Module, name: str) -> None:
    """Copy the parameters and buffers of the first rank to all ranks (collective)."""
    tensors = _tensors_of(module)
    note = f"{name} of {type(module).__name__}: " + ", ".join(
        f"{name} {tensor.dtype}{list(tensor.shape)}" for name, tensor in tensors.items()
    )
    sent = strategy.extended.broadcast([array_of(tensor) for tensor in tensors.values()], 0, note) if tensors else []
    with torch.no_grad():
        for tensor, array in zip(tensors.values(), sent, strict=True):
            fill(tensor, array)


# Methods of ReplicatedModule ----------------------------------------------------------------------------------------


def _reading(name: str) -> Callable[..., object]:
    """Return a method that calls the copy of the running replica."""

    @wraps(getattr(Module, name))
    def method(self: ReplicatedModule, *args: object, **kwargs: object) -> object:
        return getattr(self.here, name)(*args, **kwargs)

    return method


def _changing(name: str) -> Callable[..., object]:
    """Return a method that calls all copies outside of replicas. It returns the module if torch's does."""

    @wraps(getattr(Module, name))
    def method(self: ReplicatedModule, *args: object, **kwargs: object) -> object:
        first, *_ = [(module, getattr(module, name)(*args, **kwargs)) for module in self.changed()]
        return self if first[1] is first[0] else first[1]

    return method


def _refusing(name: str) -> Callable[..., NoReturn]:
    """Return a method that raises TypeError: the copies have their parts."""

    @wraps(getattr(Module, name))
    def method(_: ReplicatedModule, part: str, *_args: object, **_kwargs: object) -> NoReturn:
        raise TypeError(
            f"{name}({part!r}, ...) was called on an adopted module. Call it before the copies exist: "
            f"module.{name}({part!r}, ...); model = mpidist.torch.adopt(module)"
        )

    return method


class ReplicatedModule(Module):  # type: ignore[misc, unused-ignore]
    """A module with a copy for each replica of this rank; made by :func:`adopt`.

    Inside ``strategy.run`` it stands for the replica's own copy, outside for the first one: calls, attributes,
    parameters, ``state_dict``. A change outside of ``run`` changes all copies: ``train``, ``eval``,
    ``requires_grad_``, ``load_state_dict``, ``to``, ``apply``, ``zero_grad`` and attributes that are set. Change its
    parts, as by ``torch.nn.init`` of ``model.weight`` or ``model.body.eval()``, before :func:`adopt`.

    Args:
        strategy: The strategy of the replicas.
        copies: A module for each replica of this rank.

    Attributes:
        copies: The modules.
        strategy: The strategy.
        optimizers: The optimizers that sum gradients of the copies.
    """

    def __init__(self, strategy: Strategy, copies: list[Module]) -> None:
        super().__init__()
        # Read from the copies.
        del self.__dict__["training"]
        # Module.__setattr__ would register the copies as submodules.
        self.__dict__.update(strategy=strategy, copies=tuple(copies), optimizers=[])
        adopted.add(self)

    @property
    def here(self) -> Module:
        """The copy of the running replica; outside of ``run`` the first one."""
        return self.changed()[0]

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy of the replicas."""
        strategy: Strategy = self.strategy
        return strategy

    def changed(self) -> tuple[Module, ...]:
        """Return the copies that a change is for: in a replica its own, outside all."""
        context = get_replica_context()
        if context is None or context.strategy is not self.strategy:
            return tuple(self.copies)
        return (self.copies[context.local_replica_id],)

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the copy of this replica."""
        if len(self.copies) > 1 and is_compiled():
            raise _several_compiled("torch.compile has come to a module that mpidist has adopted")
        return self.here(*args, **kwargs)

    def __getattr__(self, name: str) -> Tensor | Module:
        if "copies" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.here, name)

    def __getitem__(self, index: object) -> Module:
        return self.here[index]

    def __repr__(self) -> str:
        return f"<ReplicatedModule with {len(self.copies)} of {self.strategy.num_replicas_in_sync} copies: {self.here}>"

    named_modules, named_children = map(_reading, ("named_modules", "named_children"))
    named_parameters, named_buffers = map(_reading, ("named_parameters", "named_buffers"))
    get_submodule, state_dict = map(_reading, ("get_submodule", "state_dict"))

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__:
            self.__dict__[name] = value
            return
        copies = self.changed()
        if len(copies) > 1 and isinstance(value, (Module, torch.Tensor)):
            raise TypeError(
                f"attribute {name!r} was set to a {type(value).__name__}, which the {len(copies)} copies would share. "
                "Set it on the module before mpidist.torch.adopt(module)."
            )
        for module in copies:
            setattr(module, name, value)

    train, requires_grad_, zero_grad = map(_changing, ("train", "requires_grad_", "zero_grad"))
    # torch's type(), double(), to_empty() and the like call _apply().
    to, _apply, load_state_dict = map(_changing, ("to", "_apply", "load_state_dict"))

    def apply(self, fn: Callable[[Module], None]) -> ReplicatedModule:
        """Call a function with each module of each copy. Outside of replicas the copies are equal afterwards."""
        copies = self.changed()
        for module in copies:
            module.apply(fn)
        if len(copies) > 1:
            # A function may draw other random numbers for each copy.
            self.make_equal()
        return self

    def compile(self, *args: object, **kwargs: object) -> None:
        """Compile the copy's calls by torch.compile. An error if this rank has several replicas."""
        if len(self.copies) > 1:
            raise _several_compiled("compile() of a module that mpidist has adopted was called")
        self.copies[0].compile(*args, **kwargs)

    register_buffer, register_parameter = map(_refusing, ("register_buffer", "register_parameter"))
    register_module, add_module = map(_refusing, ("register_module", "add_module"))

    def __deepcopy__(self, memo: dict[int, object]) -> Module:
        """Return a copy of this replica's module, which is not adopted."""
        return copy.deepcopy(self.here, memo)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "An adopted module cannot be pickled, because it has a strategy. With torch.save, save model.state_dict(). "
            "Or use mpidist.Checkpoint(model=model)."
        )

    def _checkpoint_children(self) -> dict[str, object]:
        return dict(self.copies[0].state_dict())

    def _checkpoint_defer(self, values: dict[str, Array]) -> None:
        # The first copy is restored. ``values`` are for parts that are created later: a module has none.
        self.make_equal()

    def make_equal_on_ranks(self, name: str) -> None:
        """Copy parameters and buffers of the first rank's first copy to all copies (collective).

        ``name`` is the call's, for errors. ValueError is raised if copies of this rank differ in which parameters have
        gradients, MismatchError if ranks have other modules.
        """
        first = {name: parameter.requires_grad for name, parameter in self.copies[0].named_parameters()}
        with self.strategy.extended.shared_errors(name):
            for module in self.copies[1:]:
                found = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
                if found != first:
                    differing = sorted(key for key, _ in found.items() ^ first.items())
                    raise ValueError(
                        f"copies of the module differ in which parameters have gradients: {differing[0]}. Call "
                        "model.requires_grad_() outside of strategy.run(), or a part's before mpidist.torch.adopt()."
                    )
        _copy_from_first_rank(self.strategy, self.copies[0], name)
        self.make_equal()

    def make_equal(self) -> None:
        """Copy the parameters and buffers of the first copy to the others."""
        first = _tensors_of(self.copies[0])
        with torch.no_grad():
            for module in self.copies[1:]:
                for name, tensor in _tensors_of(module).items():
                    tensor.copy_(first[name])


class SharedBuffers:
    """Copies buffers of the first replica's module, such as statistics of BatchNorm, to another.

    The replicas combine bytes by BOR, to which all but the first contribute zeros, so any dtype arrives unchanged.
    """

    def __init__(self, module: Module) -> None:
        # Modules may share a buffer, or replace theirs.
        found = {
            id(buffer): (owner, name)
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if buffer.numel()
        }
        self._places = [*found.values()]
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._work: Any = None

    def _buffers(self) -> list[Tensor]:
        return [getattr(owner, name) for owner, name in self._places]

    def start(self, context: ReplicaContext) -> None:
        """Start to fetch the buffers of the first replica (collective)."""
        if not self._places:
            return
        if context.replica_id_in_sync_group == 0:
            flat = [buffer.detach().contiguous().reshape(-1).view(torch.uint8) for buffer in self._buffers()]
            self._bytes = torch.cat(flat)
        else:
            self._bytes = torch.zeros(sum(each.nbytes for each in self._buffers()), dtype=torch.uint8)
        array = array_of(self._bytes)
        self._work = context.all_reduce_async(ReduceOp.BOR, array, out=array)

    def finish(self, context: ReplicaContext) -> None:
        """Wait for the buffers, and copy them into the module."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if context.replica_id_in_sync_group:
            buffers = self._buffers()
            for buffer, part in zip(buffers, self._bytes.split([each.nbytes for each in buffers]), strict=True):
                # A copy is aligned for any dtype.
                buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
