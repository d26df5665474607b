"""What a rank may be doing for a long time without having said so, read off its stack.

An excuse only ever buys time: names on a stack are a reason to wait, never a reason to blame.
"""

import re
from collections.abc import Sequence

from everstep.domain.evidence import Frame
from everstep.domain.phases import Phase

_SAVING_FILES = re.compile(r"torch/serialization\.py|torch/distributed/checkpoint/|/safetensors/|torch_checkpointing")
_SAVING_NAMES = re.compile(r"save|checkpoint|ckpt", re.IGNORECASE)
# not torch/_dynamo/eval_frame.py: it stands on the stack of every function that dynamo was told to leave alone
_COMPILING_FILES = re.compile(r"torch/_dynamo/(convert_frame|symbolic_convert|output_graph)|torch/_inductor/|/triton/")
_EVALUATING_NAMES = re.compile(r"(^|_)(eval|validat|generate|inference)", re.IGNORECASE)
_IMPORTING = re.compile(r"<frozen importlib")


def excuse_for(stack: Sequence[Frame]) -> Phase | None:
    """The phase that a stack speaks of: SAVING, EVALUATING, WARMING_UP for compilation and imports; None for none."""
    for frame in stack:
        if _SAVING_FILES.search(frame.file) or _SAVING_NAMES.search(frame.function):
            return Phase.SAVING
        if _COMPILING_FILES.search(frame.file) or _IMPORTING.search(frame.file):
            return Phase.WARMING_UP
        if _EVALUATING_NAMES.search(frame.function):
            return Phase.EVALUATING
    return None
