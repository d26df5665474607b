"""Which installed modules a script imports at its top, read from its text: nothing of the script is executed.

The compiler too, where the text speaks of it.

Modules of the script's own folder are read in turn for what they import, and never imported themselves. Knows nothing
of processes.
"""

import ast
import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_FILES_MAX = 300
_FILE_BYTES_MAX = 1 << 20
_ENVIRONMENT_WORDS = ("environ", "putenv", "sys.path", "addsitedir", "meta_path")
"""A statement that speaks of these may change what later imports do or find, so none after it is foreseen."""
_COMPILE_WORD, _COMPILER = b"torch.compile", "torch._inductor.compile_fx"
"""A script that compiles imports the compiler at its first step: 0.9 CPU seconds and 592 modules in torch 2.13."""


@dataclass(frozen=True, slots=True, order=True)
class Wanted:
    """A module, or with `name` perhaps the module `module.name`, as in `from module import name`."""

    module: str
    name: str = ""


@dataclass(slots=True)
class _Search:
    folder: Path
    found: dict[Wanted, None] = field(default_factory=dict)
    seen: set[Path] = field(default_factory=set)
    compiles: bool = False

    def result(self) -> list[Wanted]:
        return [*self.found, *([Wanted(_COMPILER)] if self.compiles else [])]


def imports_of_script(script: Path) -> list[Wanted]:
    """What `python script` would import at its top, in order, with what its own modules import."""
    search = _Search(folder=script.resolve().parent)
    _read(script, "", search)
    return search.result()


def imports_of_module(name: str) -> list[Wanted]:
    """The same for `python -m name`, looked up without importing its parents."""
    for entry in ["", *sys.path]:
        folder = Path(entry or ".")
        if file := _file_of(folder, name, main=True):
            search = _Search(folder=folder.resolve())
            _read(file, name if file.name == "__main__.py" else name.rpartition(".")[0], search)
            return search.result()
    return []


def import_wanted(wanted: Wanted) -> bool:
    """Import it if it is installed here; whether that went well. One that is not there is the script's affair.

    Raises:
        BaseException: whatever else a module raises while it is imported.
    """
    if not is_installed(wanted.module.partition(".")[0]):
        return False
    try:
        module = importlib.import_module(wanted.module)
        if wanted.name and not hasattr(module, wanted.name) and hasattr(module, "__path__"):
            importlib.import_module(f"{wanted.module}.{wanted.name}")
    except ImportError:
        return False
    return True


def is_installed(name: str) -> bool:
    """Whether a top-level module comes from the standard library or a site folder; not one that a user is writing."""
    if name in sys.stdlib_module_names:
        return True
    origin = _origin(name)
    places = {Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib")}
    places |= {Path(entry).resolve() for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    return origin is not None and any(place in origin.parents for place in places)


def _origin(name: str) -> Path | None:
    """Where a top-level module lies; its parents are none, so nothing is imported to find it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None:
        return None
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return Path(places[0]).resolve() if places else None


def _read(file: Path, package: str, search: _Search) -> None:
    """Take the imports of a file, and of its own modules where they are imported."""
    file = file.resolve()
    if file in search.seen or len(search.seen) >= _FILES_MAX:
        return
    search.seen.add(file)
    try:
        text = file.read_bytes()
        tree = ast.parse(text) if len(text) <= _FILE_BYTES_MAX else ast.Module(body=[], type_ignores=[])
    except (OSError, SyntaxError, ValueError, RecursionError):
        return  # the script will say so itself
    search.compiles = search.compiles or _COMPILE_WORD in text
    for statement in _imports(tree.body):
        for wanted in _wanted_by(statement, package):
            _take(wanted, search)


def _imports(body: Sequence[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that are sure to happen, up to a statement that may change where they lead."""
    for statement in body:
        match statement:
            case ast.Import() | ast.ImportFrom():
                yield statement
            case ast.Try():
                yield from _imports(statement.body)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                continue
        if not isinstance(statement, ast.Import | ast.ImportFrom) and _may_change_imports(statement):
            return


def _may_change_imports(statement: ast.stmt) -> bool:
    text = ast.unparse(statement)
    return any(word in text for word in _ENVIRONMENT_WORDS)


def _wanted_by(statement: ast.Import | ast.ImportFrom, package: str) -> Iterator[Wanted]:
    if isinstance(statement, ast.Import):
        yield from (Wanted(alias.name) for alias in statement.names)
        return
    module = statement.module or ""
    if statement.level:
        parents = package.split(".") if package else []
        kept = parents[: len(parents) - statement.level + 1]
        module = ".".join([*kept, *([module] if module else [])])
    if module and module != "__future__":
        yield from (Wanted(module, "" if alias.name == "*" else alias.name) for alias in statement.names)


def _take(wanted: Wanted, search: _Search) -> None:
    names = wanted.module.split(".")
    root = _own_root(names[0], search.folder)
    if root is None:
        search.found.setdefault(wanted)
        return
    chain = [".".join(names[:count]) for count in range(1, len(names) + 1)]
    for name in [*chain, *([f"{wanted.module}.{wanted.name}"] if wanted.name else [])]:
        if file := _file_of(root, name):
            _read(file, name if file.name == "__init__.py" else name.rpartition(".")[0], search)


def _own_root(top: str, folder: Path) -> Path | None:
    """The folder below which a module of the user's own lies; None for one that is installed, or nowhere."""
    if _file_of(folder, top):
        return folder
    if is_installed(top) or not top.isidentifier():
        return None
    if (folder / top).is_dir():
        return folder
    origin = _origin(top)  # on PYTHONPATH, or installed for editing
    if origin is None or not origin.exists():
        return None
    return origin.parent.parent if origin.name == "__init__.py" else origin.parent


def _file_of(folder: Path, name: str, *, main: bool = False) -> Path | None:
    """The file of a module below a folder.

    Args:
        main: as `-m` runs it.
    """
    base = folder.joinpath(*name.split("."))
    for file in (base / ("__main__.py" if main else "__init__.py"), base.with_name(f"{base.name}.py")):
        if file.is_file():
            return file
    return None
