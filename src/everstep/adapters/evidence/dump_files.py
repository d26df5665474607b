"""Finds the files that may be flight recorder dumps, by name and first bytes, and reads the rank off a name.

Prefixes differ: `comm_lib_trace_rank_`, `nccl_trace_rank_`, whatever TORCH_FR_DUMP_TEMP_FILE or its older name
TORCH_NCCL_DEBUG_INFO_TEMP_FILE say, and everstep's own `rank-3.2.flight_recorder.json` (rank 3, snapshot 2).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.domain.errors import ConfigError

_OWN = re.compile(r"rank-(\d+)\.(\d+)\.flight_recorder\.json")
_SNAPSHOT = re.compile(r"snapshot-(\d+)(?:\.[^/]+)?\.json")
_RANK = re.compile(r"rank[_\-.]?(\d+)", re.IGNORECASE)
_HOST = re.compile(r"(?:^|[_\-.])host[_\-.]?([A-Za-z0-9]+(?:-[A-Za-z0-9]+)*)", re.IGNORECASE)
_NUMBER = re.compile(r"(\d+)(?!.*\d)")
_LEADING_NUMBER = re.compile(r"\d+")
_OTHER_SUFFIXES = frozenset(
    ".txt .log .md .html .page .ring .jsonl .py .csv .yaml .yml .toml .sh .gz .zst .tar .zip .png .svg .tmp .pt".split()
)
_DEPTH_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpFile:
    """Attributes:
    rank: as its name has it; None when it has none.
    snapshot: everstep's number of the look; 0 for other files.
    is_snapshot: it holds what everstep saw of all ranks' processes rather than a dump.
    """

    path: Path
    rank: int | None
    snapshot: int = 0
    is_snapshot: bool = False
    host: str = ""


def find_dump_files(paths: Sequence[Path], *, prefix: str = "") -> tuple[DumpFile, ...]:
    """All candidates, in a stable order.

    Args:
        prefix: as torchfrtrace's: only files with this in their names; digits that follow it are the rank.

    Raises:
        ConfigError: a path does not exist, or none of them has a candidate.
    """
    files: list[DumpFile] = []
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path} does not exist; name a folder of flight recorder dumps, or a run directory")
        if path.is_dir():
            files += _in_folder(evidence_of(path))
        else:
            files.append(_classified(path))
    if prefix:
        files = [_with_prefix(file, prefix) for file in files if prefix in file.path.name]
    if not files:
        names = ", ".join(map(str, paths))
        if prefix:
            raise ConfigError(f"there is no flight recorder dump in {names} with {prefix!r} in its name")
        raise ConfigError(
            f"there is no flight recorder dump in {names}; name the folder that TORCH_FR_DUMP_TEMP_FILE points into"
        )
    return tuple(files)


def _with_prefix(file: DumpFile, prefix: str) -> DumpFile:
    number = _LEADING_NUMBER.match(file.path.name.partition(prefix)[2])
    return replace(file, rank=int(number[0])) if number and not file.is_snapshot else file


def evidence_of(folder: Path) -> Path:
    """For a run directory its newest incident, else the folder itself."""
    evidence = folder / "evidence"
    incidents = sorted((one for one in evidence.iterdir() if one.is_dir()), key=_age) if evidence.is_dir() else []
    return incidents[-1] if incidents else folder


def _age(path: Path) -> tuple[float, str]:
    return path.stat().st_mtime, path.name


def _in_folder(folder: Path) -> list[DumpFile]:
    return [_classified(path) for path in _walk(folder, _DEPTH_MAX) if _may_be_a_dump(path)]


def _walk(folder: Path, depth: int) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if depth > 0 and not path.is_symlink():
                yield from _walk(path, depth - 1)
        elif path.is_file():
            yield path


def _may_be_a_dump(path: Path) -> bool:
    if _SNAPSHOT.fullmatch(path.name):
        return True
    if path.suffix in _OTHER_SUFFIXES:
        return False
    return bool(_NUMBER.search(path.name)) or _starts_like_a_dump(path)


def _starts_like_a_dump(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:
        return False
    return start[:1] == b"\x80" or (start.lstrip()[:1] == b"{" and path.suffix in ("", ".json"))


def _classified(path: Path) -> DumpFile:
    if own := _OWN.fullmatch(path.name):
        return DumpFile(path=path, rank=int(own[1]), snapshot=int(own[2]))
    if snapshot := _SNAPSHOT.fullmatch(path.name):
        return DumpFile(path=path, rank=None, snapshot=int(snapshot[1]), is_snapshot=True)
    found = _RANK.search(path.name) or _NUMBER.search(path.stem) or _NUMBER.search(path.name)
    host = _HOST.search(path.name)
    return DumpFile(path=path, rank=int(found[1]) if found else None, host=host[1] if host else "")
