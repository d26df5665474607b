"""Real text that every machine with Python has: the standard library's own source, as characters. Knows no model."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

CORPUS_BYTES_MAX = 3_000_000
_ALPHABET = b"\n" + bytes(range(32, 127))
_OTHER = len(_ALPHABET)
"""The token of everything else: tabs, accents and the like."""
VOCABULARY_SIZE = _OTHER + 1
_TOKEN_OF_BYTE = bytes(_ALPHABET.index(byte) if byte in _ALPHABET else _OTHER for byte in range(256))


def read_corpus(folder: Path | None = None) -> bytes:
    """The modules of the standard library, one after the other in the order of their names, up to 3 MB.

    Args:
        folder: where `*.py` files lie; the standard library by default.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        if len(text) >= CORPUS_BYTES_MAX:
            break
        text += path.read_bytes()
    return bytes(text[:CORPUS_BYTES_MAX])


def to_tokens(text: bytes) -> Tensor:
    """One token from 0 to VOCABULARY_SIZE - 1 for each byte; a uint8 tensor of shape [len(text)]."""
    return torch.frombuffer(bytearray(text.translate(_TOKEN_OF_BYTE)), dtype=torch.uint8)


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """The corpus cut into windows: `context` tokens, and the same shifted by one as targets."""

    def __init__(self, tokens: Tensor, *, context: int) -> None:
        self._tokens = tokens
        self._context = context

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self._context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._context
        window = self._tokens[start : start + self._context + 1].long()
        return window[:-1], window[1:]
