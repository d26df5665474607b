"""What a checkpoint holds of a training: captured as plain values and tensors, and put back in place, bit for bit.

Four parts: WEIGHTS (parameters, optimizer), BUFFERS, REST (scheduler, extra objects) and OWN (gradients that wait, and
what `attach` adds: random numbers, data position). It knows neither files nor ranks.
"""

import copy
import mmap
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not, methodcaller
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from everstep.domain.errors import ConfigError

WEIGHTS, BUFFERS, REST, OWN, GROUPS = "weights", "buffers", "rest", "own", "groups"
Parts = dict[str, dict[str, Any]]

_GRADIENT, _VALUES = attrgetter("grad"), methodcaller("values")
_LAZY_BYTES = 64 << 10
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)


class Stateful(Protocol):
    """Anything with a state that can be saved: a scheduler, a GradScaler, an averaged model."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Sharing(Enum):
    """What the ranks hold of WEIGHTS."""

    REPLICATED = "the same on every rank, by construction (DDP)"
    UNKNOWN = "perhaps the same: compare"
    SHARDED = "each rank its own shards (FSDP2 and other DTensors)"


class TrainingState:
    """The objects that `attach` was given.

    Raises:
        ConfigError: an object of a kind that cannot be saved exactly.
    """

    def __init__(
        self, *, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any, extra: dict[str, Any]
    ) -> None:
        _refuse_unsupported(model, optimizer, scheduler, extra)
        self.model = unwrapped(model)
        self.ddp = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
        self.optimizer = optimizer
        self.held = OptimizerState(optimizer, self.model)
        self._others: dict[str, Stateful] = {f"extra[{name!r}]": value for name, value in extra.items()}
        if scheduler is not None:
            self._others["scheduler"] = scheduler
        self._stepped = False
        self._sharded: list[Any] | None = None
        self._children: list[Any] = []
        self._then: list[nn.Module | None] = [None]  # what was in them
        self._extra: list[tuple[str, nn.Module]] = []
        optimizer.register_step_post_hook(self._note_step)

    @property
    def sharing(self) -> Sharing:
        if any(is_dtensor(parameter) for parameter in self.model.parameters()):
            return Sharing.SHARDED
        return Sharing.REPLICATED if self.ddp is not None and self.ddp.module is self.model else Sharing.UNKNOWN

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has stepped since `begin_body`."""
        return self._stepped

    def begin_body(self) -> None:
        self._stepped = False

    def capture(self, *, weights: bool) -> Parts:
        """The state now. Tensors are the live ones where possible: write them before the next step.

        Args:
            weights: whether to include WEIGHTS.
        """
        with torch.no_grad():
            self.reshard()
            parts: Parts = {
                BUFFERS: {name: compact(buffer) for name, buffer in self.model.named_buffers()},
                REST: self.rest(),
                OWN: {"gradients": self.gradients()},
            }
            if weights:
                parts[WEIGHTS] = {
                    "parameters": {name: compact(p) for name, p in self.model.named_parameters()},
                    "optimizer": self.held.whole(),
                }
        return parts

    def snapshot(self, *, weights: bool) -> Parts:
        """The state now, copied to the CPU's memory.

        Args:
            weights: whether WEIGHTS is in it; else only the optimizer's groups.
        """
        parts = self.capture(weights=weights)
        if not weights:
            parts[GROUPS] = {"all": self.held.groups()}
        copied: Parts = _copied(parts)
        return copied

    def put_back(self, parts: Parts, *, keep: bool) -> None:
        """Make the objects what they were when `parts` was captured; without WEIGHTS in it, these stay as they are.

        Args:
            keep: leave `parts` unshared with the objects, so that it can be put back again.

        Raises:
            ConfigError: the objects are not those that were saved.
        """
        rest, weights = parts[REST], parts.get(WEIGHTS)
        if keep:
            rest = copy.deepcopy(rest)
        with torch.no_grad():
            self.reshard()
            if weights is not None:
                self._put_back_weights(weights, keep=keep)
            if GROUPS in parts:
                self.held.put_back_groups(parts[GROUPS]["all"])
            self._put_back_buffers(parts[BUFFERS], keep=keep)
        self.put_back_others(parts[OWN]["gradients"], rest)

    def put_back_others(self, gradients: dict[str, Tensor | None], rest: dict[str, Any]) -> None:
        """What `gradients` and `rest` gave."""
        with torch.no_grad():
            self._put_back_gradients(gradients)
        same_names("attach()", "objects", rest["others"], list(self._others))
        modules = dict(self.model.named_modules())
        for name, state in rest["module_extras"].items():
            modules[name].set_extra_state(state)
        for name, state in rest["others"].items():
            self._others[name].load_state_dict(state)

    def _put_back_weights(self, weights: dict[str, Any], *, keep: bool) -> None:
        same_names("model", "parameters", weights["parameters"], [n for n, _ in self.model.named_parameters()])
        for name, parameter in self.model.named_parameters():
            _copy_in(name, local(parameter), weights["parameters"][name])
        self.held.put_back(copy.deepcopy(weights["optimizer"]) if keep else weights["optimizer"])

    def reshard(self) -> None:
        """See `_sharded_modules`. Call it before looking at live tensors, under `no_grad`."""
        if self._sharded is None:
            self._sharded = _sharded_modules(self.model)
        for module in self._sharded:
            module.reshard()

    def rest(self) -> dict[str, Any]:
        """The state of the scheduler, the extra objects and modules with an extra state, as plain values."""
        extras = {
            name: plain(module.get_extra_state(), f"the extra state of {name or 'the model'}")
            for name, module in self._with_extra_state()
        }
        return {
            "module_extras": extras,
            "others": {name: plain(other.state_dict(), name) for name, other in self._others.items()},
        }

    def _with_extra_state(self) -> list[tuple[str, nn.Module]]:
        """Modules with an extra state, by name; looked for again where a module was added, replaced or taken away."""
        children = list(chain.from_iterable(map(_VALUES, self._children)))
        if len(children) != len(self._then) or not all(map(is_, children, self._then)):
            self._children = [module._modules for module in self.model.modules()]
            self._then = list(chain.from_iterable(map(_VALUES, self._children)))
            self._extra = [
                (name, module)
                for name, module in self.model.named_modules()
                if type(module).get_extra_state is not nn.Module.get_extra_state
            ]
        return self._extra

    def gradients(self, named: Iterable[tuple[str, Tensor]] | None = None) -> dict[str, Tensor | None]:
        """Gradients by name. Values are needed in the middle of an accumulation only; else that there was one does.

        Args:
            named: the model's parameters, where the caller has them.
        """
        here = list(self.model.named_parameters() if named is None else named)
        names = [name for name, _ in here]
        gradients = list(map(_GRADIENT, [parameter for _, parameter in here]))
        if self._stepped:
            return dict.fromkeys(compress(names, map(is_not, gradients, repeat(None))))
        return {name: compact(g) for name, g in zip(names, gradients, strict=True) if g is not None}

    def _put_back_gradients(self, gradients: dict[str, Tensor | None]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = _zeros_like(parameter) if name in gradients else None
            if parameter.grad is not None and (value := gradients[name]) is not None:
                _copy_in(f"the gradient of {name}", local(parameter.grad), value)

    def _put_back_buffers(self, saved: dict[str, Tensor], *, keep: bool) -> None:
        here = dict(self.model.named_buffers())
        for name, held in saved.items():
            value = held.clone() if keep else held
            if name in here and local(here[name]).shape == value.shape:
                _copy_in(name, local(here[name]), value)
                continue
            owner_name, _, leaf = name.rpartition(".")
            owner = self.model.get_submodule(owner_name)
            device = here[name].device if name in here else next(self.model.parameters()).device
            if name in here:
                setattr(owner, leaf, value.to(device))
            else:  # made by the forward pass, like a cache of positions
                owner.register_buffer(leaf, value.to(device), persistent=False)

    def _note_step(self, *_: Any) -> None:
        self._stepped = True


class OptimizerState:
    """The optimizer's part of the state, with parameters by name."""

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        self._optimizer = optimizer
        self._model = model

    def whole(self) -> dict[str, Any]:
        """The optimizer's whole `state_dict` as plain values, and which of its tensors are sharded."""
        state = self._optimizer.state_dict()
        sharded: dict[Any, list[str]] = {}
        for parameter, (index, values) in zip(self._parameters_of(state), state["state"].items(), strict=True):
            for key, value in values.items():
                if is_dtensor(value):
                    if value.placements != cast("Any", parameter).placements:
                        raise ConfigError(f"the optimizer's {key!r} is sharded otherwise than its parameter")
                    sharded.setdefault(index, []).append(key)
        return {"content": plain(state, "optimizer"), "sharded": sharded}

    def _parameters_of(self, state: dict[str, Any]) -> Iterator[Tensor | None]:
        """The live parameters in the order of `state["state"]`; None for a state that belongs to no parameter."""
        names = [index for group in state["param_groups"] for index in group["params"]]
        live = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        by_name = dict(zip(names, live, strict=True))
        return (by_name.get(index) for index in state["state"])

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups as plain values, with the number of their parameters."""
        return [
            {key: len(value) if key == "params" else plain(value, "optimizer") for key, value in group.items()}
            for group in self._optimizer.param_groups
        ]

    def adopt(self, states: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        """Make these the optimizer's state. It keeps the very tensors, unless it loads in a way of its own.

        Args:
            groups: what `groups` gave.
        """
        optimizer = self._optimizer
        here, there = ([_count(group) for group in found] for found in (optimizer.param_groups, groups))
        if here != there:
            raise ConfigError(f"the optimizer has groups of {here} parameters, the checkpoint of {there}")
        if self.loads_plainly:
            optimizer.state.clear()
            optimizer.state.update(states)
            self.put_back_groups(groups)
            return
        numbers: dict[int, Any] = {}
        saved_groups = []
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            first = len(numbers)
            numbers |= {id(parameter): first + at for at, parameter in enumerate(group["params"])}
            saved_groups.append({**saved, "params": list(range(first, first + len(group["params"])))})
        state = {numbers[id(parameter)]: values for parameter, values in states.items()}
        self.put_back({"content": {"state": state, "param_groups": saved_groups}, "sharded": {}})

    def names(self) -> dict[int, str]:
        """The names of the optimizer's parameters by their ids; one that is not the model's has a number."""
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        listed = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return {id(parameter): names.get(id(parameter), f"#{at}") for at, parameter in enumerate(listed)}

    def parameters(self) -> dict[str, Tensor]:
        """The optimizer's parameters by these names."""
        names = self.names()
        return {names[id(p)]: p for group in self._optimizer.param_groups for p in group["params"]}

    @property
    def loads_plainly(self) -> bool:
        """Whether loading a state is what PyTorch does: no method, hook or step of the optimizer's own."""
        plain_loading = type(self._optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
        hooks = (
            getattr(self._optimizer, f"_optimizer_load_state_dict_{when}_hooks", {1: 1}) for when in ("pre", "post")
        )
        return plain_loading and not any(hooks)

    @property
    def tells_plainly(self) -> bool:
        """Whether its `state_dict` is what PyTorch does."""
        hooks = (getattr(self._optimizer, f"_optimizer_state_dict_{when}_hooks", {1: 1}) for when in ("pre", "post"))
        return type(self._optimizer).state_dict is torch.optim.Optimizer.state_dict and not any(hooks)

    def put_back(self, saved: dict[str, Any]) -> None:
        """What `whole` gave, in the optimizer's own way."""
        state = saved["content"]
        here = [len(group["params"]) for group in self._optimizer.param_groups]
        if here != (there := [len(group["params"]) for group in state["param_groups"]]):
            raise ConfigError(f"the optimizer has groups of {here} parameters, the checkpoint of {there}")
        for parameter, (index, values) in zip(self._parameters_of(state), state["state"].items(), strict=True):
            for key in saved["sharded"].get(index, ()):
                values[key] = _sharded_like(parameter, values[key])
        self._optimizer.load_state_dict(state)
        for parameter, values in zip(self._parameters_of(state), state["state"].values(), strict=True):
            live = self._optimizer.state[parameter] if parameter is not None else values
            for key, value in values.items():  # torch casts the state to the parameter's type, which would round it
                if isinstance(value, Tensor) and live[key].dtype != value.dtype:
                    live[key] = value.to(device=live[key].device)

    def put_back_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """What `groups` gave."""
        for group, saved in zip(self._optimizer.param_groups, groups, strict=True):
            for key in [key for key in group if key != "params" and key not in saved]:
                del group[key]
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})


def _zeros_like(parameter: Tensor) -> Tensor:
    """A gradient of zeros; a large one takes memory when it is first written to, and most are thrown away before."""
    inner = local(parameter).detach()
    size = inner.numel() * inner.element_size()
    if not inner.is_cpu or not inner.is_contiguous() or size < _LAZY_BYTES:
        return torch.zeros_like(parameter)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    zeros = torch.frombuffer(memory, dtype=inner.dtype).view(inner.shape)
    return sharded_like(parameter, zeros) if is_dtensor(parameter) else zeros


def sharded_like(parameter: Any, value: Tensor) -> Tensor:
    """A DTensor of this part, placed like its parameter. With the very same description it costs a tenth."""
    from torch.distributed.tensor import DTensor

    if value.dtype == parameter.dtype and value.stride() == parameter._local_tensor.stride():
        return DTensor(value, parameter._spec, requires_grad=False)
    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def versions_of(state: TrainingState) -> list[int]:
    """Numbers that are others after parameters or the optimizer's state have changed."""
    states = (value for values in state.optimizer.state.values() for value in values.values())
    tensors = [*state.model.parameters(), *(value for value in states if isinstance(value, Tensor))]
    return [number for tensor in tensors for number in (id(tensor), tensor._version)]


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def is_dtensor(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")  # not imported: then there are none
    return module is not None and isinstance(value, module.DTensor)


def local(value: Tensor) -> Tensor:
    """This rank's part of a tensor; shares its memory. Call it under `no_grad`."""
    return cast("Any", value).to_local() if is_dtensor(value) else value


def compact(value: Tensor) -> Tensor:
    """This rank's part, copied only where it is a view of something larger, all of which would be written."""
    found = local(value).detach()
    if found.numel() * found.element_size() < found.untyped_storage().nbytes():
        return found.clone()
    return found


def plain(value: Any, where: str) -> Any:
    """The value in types that `torch.load(weights_only=True)` admits.

    Args:
        where: what to call it in an error.

    Raises:
        ConfigError: something else is inside, and a file with it could not be read again.
    """
    match value:
        case Tensor():
            return compact(value)
        case Counter():
            return Counter({plain(k, where): v for k, v in value.items()})
        case dict():
            items = ((plain(k, where), plain(v, f"{where}.{k}")) for k, v in value.items())
            return OrderedDict(items) if type(value) is OrderedDict else dict(items)
        case list():
            return [plain(item, f"{where}.{i}") for i, item in enumerate(value)]
        case tuple() if not isinstance(value, torch.Size):
            return tuple(plain(item, f"{where}.{i}") for i, item in enumerate(value))
        case set() | frozenset():
            return {plain(item, where) for item in value}
    if type(value) in _PLAIN:
        return value
    if (numpy := sys.modules.get("numpy")) is not None and isinstance(value, numpy.generic):
        return value.item()
    raise ConfigError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold without "
        "running code when it is read; let its state_dict() give numbers, strings, tensors, lists and dicts"
    )


def _copied(value: Any) -> Any:
    match value:
        case Tensor():
            return value.detach().to("cpu", copy=True)
        case dict():
            return {key: _copied(item) for key, item in value.items()}
        case list() | tuple():
            return type(value)(_copied(item) for item in value)
    return value


def _count(group: dict[str, Any]) -> int:
    parameters = group["params"]
    return parameters if isinstance(parameters, int) else len(parameters)


def _sharded_like(parameter: Any, value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    if not is_dtensor(parameter):
        raise ConfigError("the checkpoint was saved with fully_shard; shard the model before attach()")
    return DTensor.from_local(
        value.to(parameter.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _sharded_modules(model: nn.Module) -> list[Any]:
    """FSDP2 may leave whole parameters in these after a forward pass; saved and restored are the shards."""
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is None:
        return []
    return [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def _copy_in(name: str, live: Tensor, saved: Tensor) -> None:
    if live.shape != saved.shape or live.dtype != saved.dtype:
        raise ConfigError(
            f"{name} is {tuple(live.shape)} {live.dtype} here and {tuple(saved.shape)} {saved.dtype} in the "
            "checkpoint; restore the old model, or give attach() another directory"
        )
    live.copy_(saved)


def same_names(owner: str, what: str, saved: Iterable[str], here: list[str]) -> None:
    """Raises ConfigError where they are not the same."""
    missing, new = sorted(set(saved) - set(here)), sorted(set(here) - set(saved))
    if missing or new:
        raise ConfigError(
            f"{owner} has other {what} than the checkpoint (missing here: {', '.join(missing[:3]) or 'none'}; "
            f"not in the checkpoint: {', '.join(new[:3]) or 'none'}); restore the old ones, or give attach() another "
            "directory"
        )


def _refuse_unsupported(model: Any, optimizer: Any, scheduler: Any, extra: dict[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"attach(model=...) needs a torch.nn.Module, not a {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"attach(optimizer=...) needs a torch.optim.Optimizer, not a {type(optimizer).__name__}")
    kinds = {kind.__name__ for kind in type(optimizer).__mro__}
    if "ZeroRedundancyOptimizer" in kinds:
        raise ConfigError("attach() cannot save ZeroRedundancyOptimizer yet; use fully_shard or a plain optimizer")
    if any(kind.__name__ == "FullyShardedDataParallel" for module in model.modules() for kind in type(module).__mro__):
        raise ConfigError("attach() cannot save FullyShardedDataParallel; use torch's fully_shard (FSDP2)")
    for name, value in {"scheduler": scheduler, **{f"extra[{key!r}]": value for key, value in extra.items()}}.items():
        if value is not None and not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
            raise ConfigError(f"attach({name}) has no state_dict() and load_state_dict(), so it cannot be saved")
