"""Where a checkpoint's tensors go in this process: the model's own, the optimizer's own or fresh ones for it.

It makes room before the reading and hands everything to its owner after it; it reads nothing itself.
"""

import math
import mmap
from typing import Any

import torch
from torch import Tensor, nn

from everstep.domain.errors import ConfigError
from everstep.worker.format.frame import dtype_named
from everstep.worker.format.layout import Layout, Piece
from everstep.worker.format.pieces import Live, buffer_key, live, live_parameters, parameter_key, rest_key, state_key
from everstep.worker.restoring.read_plan import Index
from everstep.worker.saving.memory_state import fill
from everstep.worker.state import OWN, REST, TrainingState, is_dtensor, local, same_names, sharded_like

_CARVED_BYTES_MIN = 64 << 10
_ARENA_BYTES_MIN = 4 << 20
_ALIGNMENT = 64


class Landing:
    """The targets of one checkpoint. Nothing of the optimizer changes before `settle`.

    Raises:
        ConfigError: the objects are not those that were saved.
    """

    def __init__(self, state: TrainingState, layout: Layout, index: Index) -> None:
        self._state = state
        self._layout = layout
        self._index = index
        self._arena = _Arena(0)
        self._buffers: dict[str, Tensor] = {}  # those that do not take the place of a live one
        self._states: dict[str, dict[str, Tensor]] = {}
        with torch.no_grad():
            state.reshard()
            weights = self._parameter_targets()
            weights += self._state_targets()
            self.weights = weights
            self.others = self._buffer_targets()
            self.large = self._large_targets()

    @property
    def targets(self) -> list[Live]:
        return [*self.weights, *self.others, *self.large]

    @property
    def can_repeat(self) -> bool:
        """Whether reading `weights` again undoes what a step did to them."""
        return self._state.held.loads_plainly

    def settle(self, small: dict[str, Any]) -> None:
        """Hand over what was read.

        Args:
            small: the rest, as `Bulk.capture` gave it.
        """
        state = self._state
        with torch.no_grad():
            if "optimizer" in small:
                state.held.put_back(small["optimizer"])
            else:
                self.adopt(small["groups"], small["numbers"])
            for name, tensor in self._buffers.items():
                _set_buffer(state.model, name, tensor)
        rest = fill(small[REST], [found.tensor for found in self.large])
        state.put_back_others(small[OWN]["gradients"], rest)

    def adopt(self, groups: list[dict[str, Any]], numbers: dict[str, dict[str, Any]]) -> None:
        """Give the optimizer its state, by reference where it loads plainly."""
        parameters = self._state.held.parameters()
        found = {}
        for name, keys in self._layout.states.items():
            held = {**self._states[name], **numbers.get(name, {})}
            found[name] = {key: held[key] for key in keys}
        self._state.held.adopt({parameters[name]: values for name, values in found.items()}, groups)

    def _parameter_targets(self) -> list[Live]:
        here = live_parameters(self._state.model)
        same_names("model", "parameters", self._layout.parameters, list(here))
        for name, found in here.items():
            piece = self._index.first(parameter_key(name))
            assert piece is not None
            if found.whole != piece.whole or found.tensor.dtype != dtype_named(piece.dtype):
                raise ConfigError(
                    f"{name} is {found.whole} {found.tensor.dtype} here and {piece.whole} torch.{piece.dtype} in the "
                    "checkpoint; restore the old model, or give attach() another directory"
                )
        return list(here.values())

    def _state_targets(self) -> list[Live]:
        parameters = self._state.held.parameters()
        if missing := [name for name in self._layout.states if name not in parameters]:
            raise ConfigError(
                f"the checkpoint has an optimizer state of {missing[0]}, which the optimizer here does not train; "
                "restore the old optimizer, or give attach() another directory"
            )
        wanted = [(name, parameters[name], self._pieces_of(name, keys)) for name, keys in self._layout.states.items()]
        fresh = [p for _, parameter, pieces in wanted if self._live(parameter, pieces) is None for p in pieces.values()]
        if self._state.held.loads_plainly:
            self._arena = _Arena(sum(_local_bytes(piece) for piece in fresh))
        found = []
        for name, parameter, pieces in wanted:
            there = self._live(parameter, pieces)
            values = there or {key: self._room_for(parameter, piece) for key, piece in pieces.items()}
            self._states[name] = values
            found += [live(state_key(name, key), value) for key, value in values.items()]
        return found

    def _pieces_of(self, name: str, keys: tuple[str, ...]) -> dict[str, Piece]:
        """The states of a parameter that are tensors."""
        found = ((key, self._index.first(state_key(name, key))) for key in keys)
        return {key: piece for key, piece in found if piece is not None}

    def _live(self, parameter: Tensor, pieces: dict[str, Piece]) -> dict[str, Tensor] | None:
        """The optimizer's own tensors for this parameter, if they are of the very same form."""
        owner = self._state.optimizer.state.get(parameter)
        if not owner or not self._state.held.loads_plainly:
            return None
        values = {key: value for key, value in owner.items() if isinstance(value, Tensor)}
        if values.keys() != pieces.keys():
            return None
        for key, piece in pieces.items():
            value = values[key]
            if (tuple(value.shape), value.dtype) != (piece.whole, dtype_named(piece.dtype)):
                return None
            if is_dtensor(value) != _follows(parameter, piece):
                return None
        return {key: values[key] for key in pieces}

    def _room_for(self, parameter: Tensor, piece: Piece) -> Tensor:
        """A tensor for a state of this parameter, sharded like it where it has its shape."""
        dtype = dtype_named(piece.dtype)
        device = torch.device("cpu") if piece.device == "cpu" else parameter.device
        if tuple(parameter.shape) != piece.whole:
            if piece.is_sharded and piece.shape != piece.whole:
                raise ConfigError(f"{piece.key} is sharded and has another shape than its parameter")
            return self._arena.carve(piece.whole, dtype, device)
        inner = local(parameter).detach()
        if not inner.is_contiguous():
            fresh = torch.empty_like(inner, dtype=dtype, device=device)
        else:
            fresh = self._arena.carve(tuple(inner.shape), dtype, device)
        return sharded_like(parameter, fresh) if _follows(parameter, piece) else fresh

    def _buffer_targets(self) -> list[Live]:
        model, found = self._state.model, []
        here = dict(model.named_buffers())
        prefix = buffer_key("")
        for key in self._index.private_keys(prefix):
            name, piece = key.removeprefix(prefix), self._index.first(key)
            assert piece is not None
            buffer = here.get(name)
            if buffer is not None and (tuple(buffer.shape), buffer.dtype) == (piece.whole, dtype_named(piece.dtype)):
                found.append(live(key, buffer, is_private=True))
                continue
            device = buffer.device if buffer is not None else next(model.parameters()).device
            self._buffers[name] = torch.empty(piece.shape, dtype=dtype_named(piece.dtype), device=device)
            found.append(live(key, self._buffers[name], is_private=True))
        return found

    def _large_targets(self) -> list[Live]:
        found: list[Live] = []
        while (piece := self._index.first(rest_key(len(found)))) is not None:
            found.append(live(piece.key, torch.empty(piece.shape, dtype=dtype_named(piece.dtype)), is_private=True))
        return found


class _Arena:
    """One piece of fresh memory in huge pages where the kernel has them: small pages cost more than the copy.

    A page is made by the first byte that is read into it, so that what the kernel has just zeroed is overwritten while
    it is in the cache. All pages beforehand take half as long again as the copy itself.
    """

    def __init__(self, size_bytes: int) -> None:
        self._at, self._memory = 0, None
        if size_bytes >= _ARENA_BYTES_MIN:
            self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._size = size_bytes

    def carve(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = math.prod(shape)
        size = count * torch.empty(0, dtype=dtype).element_size()
        if self._memory is None or size < _CARVED_BYTES_MIN or device.type != "cpu" or self._at + size > self._size:
            return torch.empty(shape, dtype=dtype, device=device)
        tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._at).view(shape)
        self._at += size + -size % _ALIGNMENT
        return tensor


def _local_bytes(piece: Piece) -> int:
    return piece.size_bytes + -piece.size_bytes % _ALIGNMENT


def _follows(parameter: Tensor, piece: Piece) -> bool:
    """Whether a state is sharded because its parameter is."""
    return is_dtensor(parameter) and tuple(parameter.shape) == piece.whole


def _set_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    if leaf in owner._buffers:
        setattr(owner, leaf, value)
    else:  # made by the forward pass, like a cache of positions
        owner.register_buffer(leaf, value, persistent=False)
