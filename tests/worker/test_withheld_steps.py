"""A rehearsal's optimizer changes nothing, whatever PyTorch's kind; what changes all the same is noticed."""

from typing import Any

import pytest
import torch
from torch import nn

from everstep.worker.state import TrainingState
from everstep.worker.withheld_steps import marks_of, withheld_steps


def trained(kind: Any, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    optimizer = kind(model.parameters(), lr=0.1, **options)
    state = TrainingState(model=model, optimizer=optimizer, scheduler=None, extra={})
    one_step(model, optimizer)
    return model, optimizer, state


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(3, 5)).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adagrad, {}),
        (torch.optim.RMSprop, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adafactor, {}),
    ],
)
def test_a_withheld_step_changes_nothing_and_shows_the_gradients_again(kind: Any, options: dict[str, Any]) -> None:
    model, optimizer, state = trained(kind, **options)
    before, marks = [p.detach().clone() for p in model.parameters()], marks_of(state)
    state.begin_body()
    with withheld_steps(optimizer):
        one_step(model, optimizer)
    assert state.stepped
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert marks_of(state) == marks
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())
    one_step(model, optimizer)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert marks_of(state) != marks


def test_a_step_with_a_closure_is_a_real_one_and_noticed() -> None:
    model, optimizer, state = trained(torch.optim.SGD)
    marks = marks_of(state)

    def closure() -> float:
        model(torch.ones(3, 5)).square().sum().backward()
        return 0.0

    with withheld_steps(optimizer):
        optimizer.step(closure)
    assert marks_of(state) != marks


class Plain(torch.optim.SGD):
    """Somebody's own, which may not know parameters without a gradient."""


def test_an_optimizer_of_the_script_steps_as_it_does() -> None:
    model, optimizer, state = trained(Plain)
    marks = marks_of(state)
    with withheld_steps(optimizer):
        one_step(model, optimizer)
    assert marks_of(state) != marks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_parameter_changed_through_data_is_noticed(dtype: torch.dtype) -> None:
    model = nn.Linear(1, 3, bias=False, dtype=dtype)  # 6 or 12 bytes: no whole number of words
    state = TrainingState(model=model, optimizer=torch.optim.SGD(model.parameters()), scheduler=None, extra={})
    marks = marks_of(state)
    assert marks_of(state) == marks
    model.weight.data.mul_(3)
    assert marks_of(state) != marks
