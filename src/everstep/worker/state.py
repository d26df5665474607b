"""What a checkpoint holds of a training: captured as plain values and tensors, and put back in place, bit for bit.

Four parts: WEIGHTS (parameters, optimizer), BUFFERS, REST (scheduler, extra objects) and OWN (gradients that wait, and
what `attach` adds: random numbers, data position). It knows neither files nor ranks.
"""

import copy
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from everstep.domain.errors import ConfigError

WEIGHTS, BUFFERS, REST, OWN = "weights", "buffers", "rest", "own"
Parts = dict[str, dict[str, Any]]

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
        self._others: dict[str, Stateful] = {f"extra[{name!r}]": value for name, value in extra.items()}
        if scheduler is not None:
            self._others["scheduler"] = scheduler
        self._stepped = False
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
            _reshard(self.model)
            parts: Parts = {
                BUFFERS: {name: compact(buffer) for name, buffer in self.model.named_buffers()},
                REST: self.rest(),
                OWN: {"gradients": self.gradients()},
            }
            if weights:
                parts[WEIGHTS] = {
                    "parameters": {name: compact(p) for name, p in self.model.named_parameters()},
                    "places": places_of(self.model),
                    "optimizer": self._optimizer_state(),
                }
        return parts

    def snapshot(self, *, weights: dict[str, Any] | None = None) -> Parts:
        """The whole state now, copied to the CPU's memory.

        Args:
            weights: what WEIGHTS is known to be, in memory that nobody writes to; only the optimizer's groups are new.
        """
        copied: Parts = _copied(self.capture(weights=weights is None))
        if weights is not None:
            groups = plain(self.optimizer.state_dict()["param_groups"], "optimizer")
            optimizer = weights["optimizer"]
            content = {**optimizer["content"], "param_groups": groups}
            copied[WEIGHTS] = {**weights, "optimizer": {**optimizer, "content": content}}
        return copied

    def put_back(self, parts: Parts, *, keep: bool) -> None:
        """Make the objects what they were when `parts` was captured.

        Args:
            keep: leave `parts` unshared with the objects, so that it can be put back again.

        Raises:
            ConfigError: the objects are not those that were saved.
        """
        rest, weights = parts[REST], parts[WEIGHTS]
        in_place = self._takes_in_place(weights["optimizer"])
        if keep:
            rest, weights = copy.deepcopy(rest), (weights if in_place else copy.deepcopy(weights))
        _same_names("model", "parameters", weights["parameters"], [n for n, _ in self.model.named_parameters()])
        _same_names("attach()", "objects", rest["others"], list(self._others))
        with torch.no_grad():
            _reshard(self.model)
            for name, parameter in self.model.named_parameters():
                _copy_in(name, local(parameter), weights["parameters"][name])
            self._put_back_buffers(parts[BUFFERS], keep=keep)
            if in_place:
                self._copy_optimizer_in(weights["optimizer"]["content"])
            else:
                self._put_back_optimizer(weights["optimizer"])
            self._put_back_gradients(parts[OWN]["gradients"])
        modules = dict(self.model.named_modules())
        for name, state in rest["module_extras"].items():
            modules[name].set_extra_state(state)
        for name, state in rest["others"].items():
            self._others[name].load_state_dict(state)

    def reshard(self) -> None:
        """See `_reshard`. Call it before looking at live tensors, under `no_grad`."""
        _reshard(self.model)

    def rest(self) -> dict[str, Any]:
        """The state of the scheduler, the extra objects and modules with an extra state, as plain values."""
        extras = {
            name: plain(module.get_extra_state(), f"the extra state of {name or 'the model'}")
            for name, module in self.model.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        return {
            "module_extras": extras,
            "others": {name: plain(other.state_dict(), name) for name, other in self._others.items()},
        }

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients by name. Values are needed in the middle of an accumulation only; else that there was one does."""
        present = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
        return {name: None if self._stepped else compact(gradient) for name, gradient in present}

    def _put_back_gradients(self, gradients: dict[str, Tensor | None]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.grad = torch.zeros_like(parameter) if name in gradients else None
            if parameter.grad is not None and (value := gradients[name]) is not None:
                _copy_in(f"the gradient of {name}", local(parameter.grad), value)

    def _optimizer_state(self) -> dict[str, Any]:
        state = self.optimizer.state_dict()
        sharded: dict[Any, list[str]] = {}
        for parameter, (index, values) in zip(self.parameters_of(state), state["state"].items(), strict=True):
            for key, value in values.items():
                if is_dtensor(value):
                    if value.placements != cast("Any", parameter).placements:
                        raise ConfigError(f"the optimizer's {key!r} is sharded otherwise than its parameter")
                    sharded.setdefault(index, []).append(key)
        return {"content": plain(state, "optimizer"), "sharded": sharded, "names": names_of_states(self, state)}

    def parameters_of(self, state: dict[str, Any]) -> Iterator[Tensor | None]:
        """The live parameters in the order of `state["state"]`; None for a state that belongs to no parameter."""
        names = [index for group in state["param_groups"] for index in group["params"]]
        live = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        by_name = dict(zip(names, live, strict=True))
        return (by_name.get(index) for index in state["state"])

    def _put_back_optimizer(self, saved: dict[str, Any]) -> None:
        state = saved["content"]
        here = [len(group["params"]) for group in self.optimizer.param_groups]
        if here != (there := [len(group["params"]) for group in state["param_groups"]]):
            raise ConfigError(f"the optimizer has groups of {here} parameters, the checkpoint of {there}")
        for parameter, (index, values) in zip(self.parameters_of(state), state["state"].items(), strict=True):
            for key in saved["sharded"].get(index, ()):
                values[key] = _sharded_like(parameter, values[key])
        self.optimizer.load_state_dict(state)
        for parameter, values in zip(self.parameters_of(state), state["state"].values(), strict=True):
            live = self.optimizer.state[parameter] if parameter is not None else values
            for key, value in values.items():  # torch casts the state to the parameter's type, which would round it
                if isinstance(value, Tensor) and live[key].dtype != value.dtype:
                    live[key] = value.to(device=live[key].device)

    def _takes_in_place(self, saved: dict[str, Any]) -> bool:
        """Whether the optimizer has a state of the very same shape already, and nothing of its own in loading one."""
        optimizer, state = self.optimizer, saved["content"]
        if saved["sharded"] or not optimizer.state or not _loads_plainly(optimizer):
            return False
        groups = [list(group["params"]) for group in state["param_groups"]]
        if [len(group["params"]) for group in optimizer.param_groups] != [len(group) for group in groups]:
            return False
        live = list(self.parameters_of(state))
        if len(live) != len(optimizer.state):
            return False
        return all(
            parameter is not None and _same_form(optimizer.state.get(parameter), values)
            for parameter, values in zip(live, state["state"].values(), strict=True)
        )

    def _copy_optimizer_in(self, state: dict[str, Any]) -> None:
        for parameter, values in zip(self.parameters_of(state), state["state"].values(), strict=True):
            live = self.optimizer.state[cast("Tensor", parameter)]
            for key, value in values.items():
                if isinstance(value, Tensor):
                    live[key].copy_(value)
                else:
                    live[key] = value
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            for key in [key for key in group if key != "params" and key not in saved]:
                del group[key]
            group.update({key: copy.deepcopy(value) for key, value in saved.items() if key != "params"})

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


def places_of(model: nn.Module) -> dict[str, tuple[list[int], list[int]]]:
    """For each sharded parameter the shape of the whole and where this rank's part begins: what an export needs."""
    found = {}
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

            tensor = cast("Any", parameter)
            _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            found[name] = (list(tensor.shape), list(offset))
    return found


def names_of_states(state: TrainingState, content: dict[str, Any]) -> dict[Any, str]:
    """The parameter's name for each of the optimizer's states that has one, by the state's index."""
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    pairs = zip(content["state"], state.parameters_of(content), strict=True)
    return {index: names[id(parameter)] for index, parameter in pairs if id(parameter) in names}


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


def _loads_plainly(optimizer: torch.optim.Optimizer) -> bool:
    """Whether loading a state is what PyTorch does: no method, hook or step of the optimizer's own."""
    plain_loading = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict
    hooks = (getattr(optimizer, f"_optimizer_load_state_dict_{when}_hooks", {1: 1}) for when in ("pre", "post"))
    return plain_loading and not any(hooks)


def _same_form(live: dict[str, Any] | None, saved: dict[str, Any]) -> bool:
    """Whether all tensors of `saved` can be copied over those of `live`."""
    if live is None or list(live) != list(saved):
        return False
    for key, value in saved.items():
        here = live[key]
        if isinstance(value, Tensor) != isinstance(here, Tensor):
            return False
        if isinstance(value, Tensor) and (is_dtensor(here) or (here.shape, here.dtype) != (value.shape, value.dtype)):
            return False
    return True


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


def _reshard(model: nn.Module) -> None:
    """FSDP2 may leave whole parameters in the modules after a forward pass; saved and restored are the shards."""
    if (fsdp := sys.modules.get("torch.distributed.fsdp")) is not None:
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.reshard()


def _copy_in(name: str, live: Tensor, saved: Tensor) -> None:
    if live.shape != saved.shape or live.dtype != saved.dtype:
        raise ConfigError(
            f"{name} is {tuple(live.shape)} {live.dtype} here and {tuple(saved.shape)} {saved.dtype} in the "
            "checkpoint; restore the old model, or give attach() another directory"
        )
    live.copy_(saved)


def _same_names(owner: str, what: str, saved: dict[str, Any], here: list[str]) -> None:
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
