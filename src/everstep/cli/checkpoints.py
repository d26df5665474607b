"""`everstep checkpoints`: list, verify, prune and export the checkpoints of a run, on disk or in a mirror."""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from everstep.adapters.checkpoints.object_store import is_url
from everstep.cli.checkpoint_rows import HEAD, row
from everstep.cli.mirrored import MirrorShelf
from everstep.domain.errors import ConfigError, EverstepError, EvidenceError, ExitCode, WorldError
from everstep.worker.format import manifest as manifests
from everstep.worker.format.manifest import Manifest
from everstep.worker.format.retention import remove_old

_EPILOG = """\
examples:
  everstep checkpoints everstep-runs/latest list
  everstep checkpoints RUN verify                               read every file and test its checksum
  everstep checkpoints RUN prune --keep 1                       remove all but the newest complete one
  everstep checkpoints RUN export --to dcp --out final          for dcp.load, without everstep
  everstep checkpoints RUN export --to safetensors --out model.safetensors --step 500
  everstep checkpoints s3://bucket/run list                     what a mirror has; also verify, prune, export
  everstep checkpoints RUN list --mirror s3://bucket/run        both
  everstep checkpoints s3://bucket/run fetch --out DIR          bring the newest one here, tested

exit code 10 when verify finds damage; RUN is a run directory, a folder of checkpoints, or the URL of a mirror.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `checkpoints` command."""
    parser = subparsers.add_parser(
        "checkpoints",
        help="list, verify, prune and export a run's checkpoints",
        description="Look after the checkpoints of a run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", metavar="RUN", help="run directory, a folder of checkpoints, or a mirror's URL")
    parser.add_argument("action", choices=("list", "verify", "prune", "export", "fetch"))
    parser.add_argument(
        "--step", type=int, default=None, metavar="N", help="this one (default: verify all, export newest)"
    )
    parser.add_argument("--keep", type=int, default=2, metavar="N", help="complete ones that prune leaves (default: 2)")
    parser.add_argument("--to", choices=("dcp", "safetensors"), default="dcp", help="form of the export (default: dcp)")
    parser.add_argument(
        "--out", type=Path, default=None, metavar="PATH", help="where the export or the fetched one goes"
    )
    parser.add_argument("--mirror", default="", metavar="URL", help="list this mirror, too")


def run(args: argparse.Namespace) -> int:
    """Do one of the five. Returns the exit code.

    Raises:
        ConfigError: there are no checkpoints, or not the one that was asked for.
        WorldError: a mirror fails, or the disk removes nothing.
    """
    if is_url(args.run_dir):
        return _run_mirror(args)
    if args.action == "fetch":
        raise ConfigError(f"fetch brings a checkpoint from a mirror: give its URL instead of {args.run_dir}")
    given = Path(args.run_dir)
    folder = given / "checkpoints" if (given / "checkpoints").is_dir() else given
    try:
        steps = manifests.all_steps(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read ({error.strerror}); give a run directory") from error
    if args.step is not None:
        if args.step not in steps:
            raise ConfigError(f"{folder} has no checkpoint of step {args.step}; it has {_named(steps)}")
        steps = [args.step]
    match args.action:
        case "list":
            sys.stdout.writelines(f"{line}\n" for line in _rows(folder, steps))
            if args.mirror:
                sys.stdout.writelines(f"{line}\n" for line in MirrorShelf(args.mirror, args.step).rows())
            return ExitCode.DONE
        case "verify":
            return _verify(folder, steps)
        case "prune":
            return _prune(folder, args.keep)
    return _export(folder, args.to, args.out, args.step)


def _run_mirror(args: argparse.Namespace) -> int:
    shelf = MirrorShelf(args.run_dir, args.step)
    match args.action:
        case "list":
            sys.stdout.writelines(f"{line}\n" for line in (HEAD, *shelf.rows()))
            return ExitCode.DONE
        case "verify":
            return shelf.verify()
        case "prune":
            _check_keep(args.keep)
            return shelf.prune(args.keep)
    if args.out is None:
        raise ConfigError(f"{args.action} needs --out PATH")
    if args.action == "fetch":
        sys.stdout.write(f"{shelf.fetch(args.out)}\n")
        return ExitCode.DONE
    with tempfile.TemporaryDirectory(prefix="everstep-export-") as folder:
        shelf.fetch(Path(folder))
        return _export(Path(folder), args.to, args.out, None)


def _check_keep(keep: int) -> None:
    if keep < 1:
        raise ConfigError(f"--keep {keep}: the last complete checkpoint always stays; write 1 or more")


def _named(steps: Sequence[int]) -> str:
    return ", ".join(str(step) for step in steps) or "none"


def _rows(folder: Path, steps: Sequence[int]) -> Iterator[str]:
    yield HEAD
    for step in steps:
        path = folder / manifests.folder_name(step)
        written = f"{datetime.fromtimestamp(path.stat().st_mtime).astimezone():%Y-%m-%d %H:%M}"
        try:
            found: Manifest | EverstepError = manifests.read(path)
        except (EvidenceError, ConfigError) as problem:
            found = problem
        yield row(step, written, found)
    for path in sorted(folder.glob("refused-*")):
        yield f"refused, kept as evidence: {path.name}"


def _verify(folder: Path, steps: Sequence[int]) -> int:
    damaged = 0
    for step in steps:
        path = folder / manifests.folder_name(step)
        problems = list(_problems(path))
        damaged += bool(problems)
        sys.stdout.write(f"step {step}: {'; '.join(problems) or 'every file is as it was written'}\n")
    if not steps:
        sys.stdout.write(f"{folder} has no checkpoint\n")
    return ExitCode.SCRIPT_BUG if damaged else ExitCode.DONE


def _problems(path: Path) -> Iterator[str]:
    try:
        manifest = manifests.read(path)
    except (EvidenceError, ConfigError) as problem:
        yield str(problem)
        return
    for entry in manifest.each_file:
        try:
            manifests.check(path, entry)
        except EvidenceError as problem:
            yield str(problem)


def _prune(folder: Path, keep: int) -> int:
    _check_keep(keep)
    try:
        removed = remove_old(folder, keep, ".tmp-old-")
    except OSError as error:
        raise WorldError(f"{error.filename or folder} cannot be removed: {error.strerror}") from error
    sys.stdout.writelines(f"removed step {step}\n" for step in removed)
    return ExitCode.DONE


def _export(folder: Path, to: str, out: Path | None, step: int | None) -> int:
    complete = manifests.complete_steps(folder)
    if step is None and not complete:
        raise ConfigError(f"{folder} has no complete checkpoint to export")
    chosen = complete[0] if step is None else step
    if out is None:
        raise ConfigError("export needs --out PATH: a new folder for dcp, a new file for safetensors")
    from everstep.worker.format.export import export  # torch, only here

    export(folder / manifests.folder_name(chosen), to, out)
    sys.stdout.write(f"step {chosen} is in {out}\n")
    return ExitCode.DONE
