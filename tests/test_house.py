"""The rules of the house that a machine can check, read from the source text; it knows nothing of what code does."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"

STOREYS = (("domain",), ("policy", "planning", "ports"), ("adapters", "sim", "views"), ("runtime", "worker"), ("cli",))
FLOORS = {package: floor for floor, packages in enumerate(STOREYS) for package in packages}
FORBIDDEN_PAIRS = {("runtime", "adapters"), ("runtime", "sim")}
OWNERS = {"torch": "worker", "numpy": "worker", "rich": "cli"}
PURE = {"domain", "policy", "planning"}
PURE_STDLIB = set(
    "__future__ abc base64 bisect collections contextlib copy dataclasses enum fractions functools graphlib hashlib "
    "heapq itertools json math numbers operator re statistics string struct textwrap types typing".split()
)
FORBIDDEN_NAMES = set("manager util utils helper helpers common misc base handler handlers processor".split())
PRIVATE_WORDS = tuple(word.replace("_", "") for word in ("/_work/", "fa_rm-", ".lib_rary", "pypi_-more"))
PUBLIC_PLACES = ("src", "tests", "docs", "bench", "examples", ".ci", "Makefile", "pyproject.toml", "constraints.txt")

FILE_LINES_MAX, FUNCTION_LINES_MAX, PUBLIC_METHODS_MAX, CONSTRUCTOR_PARAMETERS_MAX = 600, 80, 8, 6


@dataclass(frozen=True)
class Source:
    """One Python file: where it is, its dotted module name, its text and its syntax tree."""

    where: str
    module: str
    text: str
    tree: ast.Module
    is_package: bool

    @property
    def package(self) -> str:
        """The floor's name: "policy" for everstep.policy.hang; "cli" for everstep.__main__; "" for everstep itself."""
        package = [*self.module.split("."), ""][1]
        return "cli" if package == "__main__" else package


@dataclass(frozen=True)
class Import:
    line: int
    target: str
    name: str | None
    for_types_only: bool


Checker = Callable[[Source], Iterator[str]]


def written(text: str, module: str = "everstep.policy.example") -> Source:
    return Source("example.py", module, text, ast.parse(text), is_package=False)


def read(path: Path) -> Source:
    text = path.read_text(encoding="utf-8")
    parts = list(path.relative_to(SRC if path.is_relative_to(SRC) else ROOT).with_suffix("").parts)
    is_package = parts[-1] == "__init__"
    module = ".".join(parts[:-1] if is_package else parts)
    return Source(str(path.relative_to(ROOT)), module, text, ast.parse(text, str(path)), is_package)


@cache
def house() -> tuple[Source, ...]:
    return tuple(read(path) for path in sorted((SRC / "everstep").rglob("*.py")))


def imports(source: Source) -> list[Import]:
    """Every import, also those in functions, under TYPE_CHECKING and through import_module("...")."""
    found: list[Import] = []

    def visit(node: ast.AST, types_only: bool) -> None:
        match node:
            case ast.Import():
                found.extend(Import(node.lineno, alias.name, None, types_only) for alias in node.names)
            case ast.ImportFrom():
                target = absolute(source, node)
                found.extend(Import(node.lineno, target, alias.name, types_only) for alias in node.names)
            case ast.Call(func=ast.Name(id=f) | ast.Attribute(attr=f), args=[ast.Constant(value=str(name)), *_]):
                if f in {"import_module", "__import__"}:
                    found.append(Import(node.lineno, name, None, types_only))
        guarded: list[ast.stmt] = []
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            guarded = node.body
        for child in ast.iter_child_nodes(node):
            visit(child, types_only or child in guarded)

    visit(source.tree, False)
    return found


def absolute(source: Source, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = source.module.split(".")
    kept = parts[: len(parts) - node.level + (1 if source.is_package else 0)]
    return ".".join([*kept, node.module] if node.module else kept)


def floor_of(found: Import) -> str | None:
    """The package of everstep that an import reaches, or None for the outside and for everstep itself."""
    parts = found.target.split(".")
    if parts[0] != "everstep":
        return None
    name = parts[1] if len(parts) > 1 else found.name
    return name if name in FLOORS or len(parts) > 1 else None


def upstairs_imports(source: Source) -> Iterator[str]:
    here = source.package
    if here and here not in FLOORS:
        yield f"{source.where}:1: package {here!r} has no floor; move the file, or give it a floor in STYLE.md and here"
        return
    for found in imports(source):
        there = floor_of(found)
        if there is None or there == here:
            continue
        if there not in FLOORS:
            yield f"{source.where}:{found.line}: imports {there!r}, which has no floor; import from a listed package"
        elif not here:
            yield f"{source.where}:{found.line}: everstep/__init__.py imports {there!r}; leave it to its users"
        elif FLOORS[there] >= FLOORS[here] or (here, there) in FORBIDDEN_PAIRS:
            yield f"{source.where}:{found.line}: {here} may not import {there}; take it as an argument or from ports"


def foreign_imports(source: Source) -> Iterator[str]:
    for found in imports(source):
        top = found.target.split(".")[0]
        if source.package != OWNERS.get(top, source.package):
            yield f"{source.where}:{found.line}: imports {top}, which only {OWNERS[top]}/ may; move this code there"


def impurities(source: Source) -> Iterator[str]:
    if source.package not in PURE:
        return
    for found in imports(source):
        top = found.target.split(".")[0]
        pure = (
            top in PURE_STDLIB | {"everstep"}
            or (top == "msgspec" and source.package == "domain")
            or (top == "random" and found.for_types_only)
            or (top == "pathlib" and (found.name or "").startswith("Pure"))
        )
        if not pure:
            yield f"{source.where}:{found.line}: {source.package} is pure and imports {top}; take it as an argument"
    for line in calls(source, "open"):
        yield f"{source.where}:{line}: {source.package} is pure and opens a file; let an adapter read it"


def calls(source: Source, name: str) -> Iterator[int]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield node.lineno


def prints(source: Source) -> Iterator[str]:
    if source.package != "cli":
        for line in calls(source, "print"):
            yield f"{source.where}:{line}: prints; return the text to cli/, or log it"


def circles(sources: tuple[Source, ...]) -> Iterator[str]:
    modules = {source.module: source for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        reached = {f"{i.target}.{i.name}" if f"{i.target}.{i.name}" in modules else i.target for i in imports(source)}
        graph[source.module] = (reached & modules.keys()) - {source.module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        circle = list(reversed(error.args[1]))
        yield f"{modules[circle[0]].where}:1: import circle {' -> '.join(circle)}; move what they share downstairs"


def oversizes(source: Source) -> Iterator[str]:
    lines = len(source.text.splitlines())
    if lines > FILE_LINES_MAX:
        yield f"{source.where}:{lines}: {lines} lines, over {FILE_LINES_MAX}; split the file by what it knows"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield f"{source.where}:{node.lineno}: {node.name}: {lines} lines, over {FUNCTION_LINES_MAX}; split it"
        if isinstance(node, ast.ClassDef):
            yield from oversized_class(source, node)


def oversized_class(source: Source, node: ast.ClassDef) -> Iterator[str]:
    methods = [child for child in node.body if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)]
    public = {m.name for m in methods if not m.name.startswith("_") and not is_property(m)}
    if len(public) > PUBLIC_METHODS_MAX:
        yield f"{source.where}:{node.lineno}: {node.name} has {len(public)} public methods, over 8; split it in two"
    for method in methods:
        if method.name == "__init__":
            a = method.args
            count = len(a.posonlyargs + a.args + a.kwonlyargs) - 1 + bool(a.vararg) + bool(a.kwarg)
            if count > CONSTRUCTOR_PARAMETERS_MAX:
                yield f"{source.where}:{method.lineno}: {node.name} takes {count} parameters, over 6; gather a config"


def is_property(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = (ast.unparse(decorator).split(".")[-1] for decorator in method.decorator_list)
    return any(name in {"property", "cached_property", "setter", "deleter"} for name in names)


def missing_openings(source: Source) -> Iterator[str]:
    opening = (ast.get_docstring(source.tree) or "").split("\n\n")[0].strip()
    if not opening:
        yield f"{source.where}:1: no docstring; open with one sentence: what the file is for and what it does not know"
    elif not re.search(r"[.?!][\"')`]*$", opening):
        yield f"{source.where}:1: the docstring's first paragraph is no sentence; end it with a period"


def swallowed_errors(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            broad = node.type is None or names_every_error([node.type])
            if all(ast.unparse(statement) in {"pass", "..."} for statement in node.body):
                yield f"{source.where}:{node.lineno}: the handler does nothing; act, or use contextlib.suppress"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "suppress":
            broad = names_every_error(node.args)
        else:
            continue
        if broad and "# outermost frame" not in source.text.splitlines()[node.lineno - 1]:
            yield f"{source.where}:{node.lineno}: catches all; name the errors, or say `# outermost frame` on this line"


def names_every_error(caught: list[ast.expr]) -> bool:
    names = (node for part in caught for node in ast.walk(part) if isinstance(node, ast.Name))
    return any(node.id in {"Exception", "BaseException"} for node in names)


def vague_names(path: Path) -> Iterator[str]:
    for part in path.with_suffix("").parts:
        if part.split("_")[-1] in FORBIDDEN_NAMES:
            yield f"{path}:1: {part!r} says nothing; name the file after the one thing it knows"


def private_words(where: str, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        for word in PRIVATE_WORDS:
            if word in line:
                yield f"{where}:{number}: names {word!r}, known on one machine only; use a made-up name"


def public_files() -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", "--", "README*", *PUBLIC_PLACES]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def assert_none(problems: Iterable[str]) -> None:
    found = list(problems)
    assert not found, f"{len(found)} broken house rules:\n" + "\n".join(found)


def assert_in_house(check: Checker) -> None:
    assert_none(problem for source in house() for problem in check(source))


def finds(check: Checker, text: str, module: str = "everstep.policy.example") -> bool:
    return any(check(written(text, module)))


# The house as it stands.


def test_imports_run_downstairs_only() -> None:
    assert_in_house(upstairs_imports)


def test_torch_and_numpy_are_imported_in_worker_only_and_rich_in_cli_only() -> None:
    assert_in_house(foreign_imports)


def test_domain_policy_and_planning_are_pure() -> None:
    assert_in_house(impurities)


def test_only_the_command_line_prints() -> None:
    assert_in_house(prints)


def test_importing_everstep_and_its_command_line_loads_no_torch() -> None:
    names = [name for name in ("everstep", "everstep.cli.main") if any(s.module == name for s in house())]
    script = "import sys, " + ", ".join(names) + "; sys.exit('torch was loaded' if 'torch' in sys.modules else 0)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, f"import of {names}: {result.stderr}; move the import of torch into worker/"


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert_none(circles(house()))


def test_files_functions_classes_and_constructors_keep_their_size() -> None:
    assert_in_house(oversizes)


def test_every_file_opens_with_a_sentence() -> None:
    others = [read(p) for place in ("tests", "bench", "examples") for p in sorted((ROOT / place).rglob("*.py"))]
    assert_none(problem for source in [*house(), *others] for problem in missing_openings(source))


def test_no_error_is_swallowed() -> None:
    assert_in_house(swallowed_errors)


def test_no_file_has_a_name_that_says_nothing() -> None:
    assert_none(problem for source in house() for problem in vague_names(Path(source.where)))


def test_no_public_file_names_a_private_place() -> None:
    texts = {str(p.relative_to(ROOT)): p.read_text(encoding="utf-8", errors="replace") for p in public_files()}
    assert_none(problem for where, text in texts.items() for problem in private_words(where, text))


# The checkers themselves: each finds a broken rule and leaves a kept one alone.


def test_the_import_checker_sees_every_kind_of_import() -> None:
    for text in (
        "from everstep.runtime.agent import Agent",
        "def f():\n    import everstep.adapters.clock",
        "if TYPE_CHECKING:\n    from everstep import cli",
        "from ..planning import spares",
        "import_module('everstep.ports')",
    ):
        assert finds(upstairs_imports, text), text
    assert finds(upstairs_imports, "import everstep.sim.world", "everstep.runtime.agent")
    assert finds(upstairs_imports, "x = 1", "everstep.elsewhere.x")
    assert not finds(upstairs_imports, "from everstep.domain.ids import Rank\nfrom everstep import __version__")
    assert not finds(upstairs_imports, "from everstep.adapters import clock", "everstep.cli.run")
    assert not finds(upstairs_imports, "from everstep.ports import Clock", "everstep.runtime.agent")


def test_the_owner_checkers_find_torch_inside_a_function_and_printing_outside_cli() -> None:
    text = "def f():\n    import torch.distributed as dist"
    assert finds(foreign_imports, text, "everstep.adapters.gpu")
    assert not finds(foreign_imports, text, "everstep.worker.observer")
    assert finds(prints, "print('x')", "everstep.worker.attach")
    assert not finds(prints, "print('x')", "everstep.cli.run")


def test_the_purity_checker_knows_clocks_chance_paths_and_the_codec() -> None:
    for text in ("import time", "import random", "from pathlib import Path", "import msgspec", "open('x')"):
        assert finds(impurities, text), text
    assert not finds(impurities, "if TYPE_CHECKING:\n    from random import Random\nfrom pathlib import PurePath")
    assert not finds(impurities, "import msgspec", "everstep.domain.codec")
    assert not finds(impurities, "import time", "everstep.adapters.clock")


def test_the_circle_checker_names_the_circle() -> None:
    a = written("from everstep.policy import b", "everstep.policy.a")
    (problem,) = circles((a, written("def f(): import everstep.policy.a", "everstep.policy.b")))
    assert {"everstep.policy.a", "everstep.policy.b"} <= set(problem.replace(";", "").split())
    assert not list(circles((a, written("import math", "everstep.policy.b"))))


def test_the_size_checker_counts_lines_methods_and_parameters() -> None:
    eight = "class A:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(8))
    seven_parameters = "class A:\n    def __init__(self, a, b, c, d, e, *, f, g): ...\n"
    nine = eight + "    def more(self): ...\n"
    for text in ("x = 1\n" * 601, "def f():\n" + "    x = 1\n" * 80, nine, seven_parameters):
        assert finds(oversizes, text), text[:60]
    kept = (
        "    def _own(self): ...\n    @property\n    def p(self): ...\n    def __init__(self, a, b, c, d, e, f): ...\n"
    )
    assert not finds(oversizes, eight + kept + "def f():\n" + "    x = 1\n" * 79)


def test_the_opening_checker_wants_a_sentence() -> None:
    for text in ("x = 1", '"""No period"""', '"""Half a sentence\n\nThe rest."""'):
        assert finds(missing_openings, text), text
    assert not finds(missing_openings, '"""A sentence that\nwraps.\n\nMore"""')


def test_the_error_checker_finds_broad_and_empty_handlers() -> None:
    for caught in ("except Exception:", "except:", "except (OSError, BaseException) as error:"):
        assert finds(swallowed_errors, f"try:\n    f()\n{caught}\n    g()"), caught
    assert finds(swallowed_errors, "try:\n    f()\nexcept OSError:\n    pass")
    assert finds(swallowed_errors, "with contextlib.suppress(Exception):\n    f()")
    assert not finds(swallowed_errors, "try:\n    f()\nexcept Exception:  # outermost frame\n    g()")
    assert not finds(swallowed_errors, "with suppress(OSError):\n    f()")


def test_the_name_checkers_find_vague_and_private_names() -> None:
    assert list(vague_names(Path("src/everstep/policy/restart_utils.py")))
    assert not list(vague_names(Path("src/everstep/policy/restarts.py")))
    assert list(private_words("x", f"see {PRIVATE_WORDS[0]}shared"))
    assert not list(private_words("x", "see docs/design.md, framework/ and a farm"))
