"""Steps of an optimizer that change nothing: a rehearsal needs the backward pass alone, and to undo a step takes time.

The optimizer finds no gradients and passes every parameter over; its hooks, and whoever counts its steps, see a step.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from everstep.worker.state import TrainingState, local, versions_of

_WORD_BYTES = 8


@contextlib.contextmanager
def withheld_steps(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Hide the gradients from the optimizer in each of its steps.

    That is done to PyTorch's own ones, which pass over what has no gradient, and not where a step computes gradients
    itself; others step as they do.
    """
    hidden: list[tuple[Tensor, Tensor]] = []

    def hide(_: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if any(arguments[1:]) or any(keywords.values()):  # a closure
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def show(*_: Any) -> None:
        for parameter, gradient in hidden:
            parameter.grad = gradient
        hidden.clear()

    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        yield
        return
    hooks = [optimizer.register_step_pre_hook(hide), optimizer.register_step_post_hook(show)]
    try:
        yield
    finally:
        show()
        for hook in hooks:
            hook.remove()


def marks_of(state: TrainingState) -> list[int]:
    """Numbers that are others after parameters (through `.data`, too) or the optimizer's state have changed."""
    with torch.no_grad():
        sums = [_sum_of(local(parameter).detach()) for parameter in state.model.parameters()]
        whole = torch.stack([found.cpu() for found in sums]).tolist() if sums else []
    return versions_of(state) + whole


def _sum_of(tensor: Tensor) -> Tensor:
    """The sum of a tensor's memory as 64-bit words, wrapping around."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    flat = tensor.contiguous().view(-1)
    if not flat.numel():
        return torch.zeros((), dtype=torch.int64)
    aligned = flat.storage_offset() * flat.element_size() % _WORD_BYTES == 0 and flat.nbytes % _WORD_BYTES == 0
    if aligned and flat.data_ptr() % _WORD_BYTES == 0:
        return flat.view(torch.int64).sum()
    return flat.view(torch.uint8).sum(dtype=torch.int64)
