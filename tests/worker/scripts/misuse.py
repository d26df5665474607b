"""Uses `attach` in wrong and in unusual ways, outside of `everstep run`, and checks the sentences itself."""

import os
import sys
from pathlib import Path

import torch

from everstep.domain.errors import ConfigError
from everstep.worker import attach


class Odd:
    """Its state would need code to be read."""

    def state_dict(self) -> dict[str, object]:
        return {"kind": Odd}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError(state)


def says(sentence: str, call: object, *arguments: object, **named: object) -> None:
    try:
        call(*arguments, **named)  # type: ignore[operator]
    except ConfigError as error:
        found = str(error)
    else:
        found = "nothing"
    if sentence not in found:
        raise AssertionError(f"{found!r} does not say {sentence!r}")


os.chdir(sys.argv[1])
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
given = {"model": model, "optimizer": optimizer}
os.environ["WORLD_SIZE"] = "2"
says("call torch.distributed.init_process_group() before", attach, **given)
del os.environ["WORLD_SIZE"]
says("extra['set'].kind is a ", attach, **given, extra={"set": Odd()})
says("save_every_steps=0", attach, **given, save_every_steps=0)
run = attach(**given)
says("twice", attach, **given)
says("at least 1", run.steps, [1], until=0)
says("iterable", run.steps, 3, until=2)

saved = Path("everstep-checkpoints")
for number in run.steps([10, 20, 30], until=5):
    run.log(loss=float(number), other=1.0)
    if run.step == 1:
        run.save()
        assert not list(saved.iterdir()), "inside of the loop it saves at the end of the step"
    if run.step == 2:
        assert [path.name for path in saved.iterdir()] == ["step-00000002"]
        break
assert run.metrics == {"loss": 30.0, "other": 1.0}, run.metrics
says("after a break", run.save)
for _ in run.steps([1], until=4):
    pass
run.save()
assert sorted(path.name for path in saved.iterdir()) == ["step-00000002", "step-00000004"]
