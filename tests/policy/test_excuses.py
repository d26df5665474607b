"""What a stack speaks of buys a rank time; ordinary training and waiting do not."""

import pytest

from everstep.domain.evidence import Frame
from everstep.domain.phases import Phase
from everstep.policy.excuses import excuse_for

SITE = "/venv/lib/python3.11/site-packages"


def frame(function: str, file: str = "/home/me/train.py") -> Frame:
    return Frame(file=file, line=1, function=function)


@pytest.mark.parametrize(
    ("innermost", "excuse"),
    [
        (frame("_save", f"{SITE}/torch/serialization.py"), Phase.SAVING),
        (frame("write_data", f"{SITE}/torch/distributed/checkpoint/filesystem.py"), Phase.SAVING),
        (frame("save_file", f"{SITE}/safetensors/torch.py"), Phase.SAVING),
        (frame("save_checkpoint"), Phase.SAVING),
        (frame("write_ckpt"), Phase.SAVING),
        (frame("_compile", f"{SITE}/torch/_dynamo/convert_frame.py"), Phase.WARMING_UP),
        (frame("codegen", f"{SITE}/torch/_inductor/graph.py"), Phase.WARMING_UP),
        (frame("make_launcher", f"{SITE}/triton/runtime/jit.py"), Phase.WARMING_UP),
        (frame("_find_and_load", "<frozen importlib._bootstrap>"), Phase.WARMING_UP),
        (frame("evaluate"), Phase.EVALUATING),
        (frame("run_validation"), Phase.EVALUATING),
        (frame("generate"), Phase.EVALUATING),
    ],
)
def test_a_stack_that_speaks_of_a_long_phase_is_excused(innermost: Frame, excuse: Phase) -> None:
    assert excuse_for([innermost, frame("main")]) is excuse
    assert excuse_for([frame("write", "/usr/lib/python3.11/zipfile.py"), innermost, frame("main")]) is excuse


@pytest.mark.parametrize(
    "innermost",
    [
        frame("train_step"),
        frame("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py"),
        frame("_fn", f"{SITE}/torch/_dynamo/eval_frame.py"),
        frame("retrieval_loss"),
        frame("sleep"),
    ],
)
def test_ordinary_work_is_not_excused(innermost: Frame) -> None:
    assert excuse_for([innermost, frame("main")]) is None


def test_an_empty_stack_excuses_nothing() -> None:
    assert excuse_for([]) is None


def test_the_innermost_frame_that_speaks_decides() -> None:
    assert excuse_for([frame("evaluate"), frame("save_best_model")]) is Phase.EVALUATING
