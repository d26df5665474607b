"""everstep keeps large synchronous PyTorch training productive; this file knows its version and `diagnose`."""

import importlib

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`everstep.diagnose(paths)`, found when it is asked for: `import everstep` loads nothing."""
    if name == "diagnose":
        return importlib.import_module(f"{__name__}.cli.diagnosing").diagnose
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
