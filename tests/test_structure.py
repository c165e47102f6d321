"""The project's own rules, checked on its sources: import arrows, private torch symbols, native includes, file length, a
quiet import. Nothing here imports the modules under test, except one child process that imports the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"zinf_compile": ROOT / "zinf_compile", "zinf_compile.passes": ROOT / "passes", "zinf_compile.runtime": ROOT / "runtime"}
PLAIN_DATA = ("zinf_compile.schedule", "zinf_compile.program", "zinf_compile.errors")
JUDGES = ("zinf_compile.verify", "zinf_compile.simulate")
C10_SOURCES = ("cpu_allocator", "cpu_heap")  # they implement c10::Allocator


def modules() -> dict[str, Path]:
    """Dotted name -> file, for every module of the package; a package's __init__ has the package's name."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts))
            found[name.removesuffix(".__init__")] = path
    return found


def imports(name: str, tree: ast.AST, is_package: bool) -> set[str]:
    """Dotted names that a module imports; for `from a import b` both `a` and `a.b`, since b may be a module. Imports under
    TYPE_CHECKING are types only and don't count; those inside functions do."""
    found: set[str] = set()
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(n for stmt in node.body for n in ast.walk(stmt))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = name.split(".")
                parents = parents[: len(parents) - node.level + is_package]
                base = ".".join((*parents, *filter(None, [node.module])))
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def graph() -> dict[str, set[str]]:
    """module -> what it imports: modules of the package by full name, others by their first two components."""
    own = modules()
    edges: dict[str, set[str]] = {}
    for name, path in own.items():
        raw = imports(name, ast.parse(path.read_text()), path.name == "__init__.py")
        edges[name] = {i if i in own else ".".join(i.split(".")[:2]) for i in raw if not i.startswith("zinf_compile") or i in own}
    return edges


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_executing_side_does_not_import_the_planner():
    for name, targets in graph().items():
        if under(name, "zinf_compile.runtime") or under(name, "zinf_compile.passes"):
            wrong = {t for t in targets if under(t, "zinf_compile.planner")}
            assert not wrong, f"{name} imports {wrong}: a pass or the runtime decides nothing"


def test_judges_share_nothing_with_the_planner():
    """verify and simulate import plain data and each other (a plan's predictions are compared with the simulation) only."""
    for name, targets in graph().items():
        if any(under(name, judge) for judge in JUDGES):
            own = {t for t in targets if under(t, "zinf_compile")} - {"zinf_compile"}
            wrong = {t for t in own if t not in PLAIN_DATA and not any(under(t, judge) for judge in JUDGES)}
            assert not wrong, f"{name} imports {wrong}"
            assert not any(under(t, "torch") for t in targets), f"{name} imports torch"


def test_planner_and_plain_data_never_reach_torch():
    """By any chain of imports within the package, its root excepted (importing a submodule runs the root in any case)."""
    edges = graph()
    for start in (n for n in edges if under(n, "zinf_compile.planner") or n in PLAIN_DATA):
        todo, seen = [start], set()
        while todo:
            name = todo.pop()
            if name in seen or name == "zinf_compile":
                continue
            seen.add(name)
            assert not under(name, "torch"), f"{start} reaches torch by {sorted(seen)}"
            assert not under(name, "zinf_compile.runtime") and not under(name, "zinf_compile.passes"), f"{start} reaches {name}"
            todo += edges.get(name, ())


def private_torch(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted name) of each torch name with a component that starts with one underscore, through import aliases."""
    alias: dict[str, str] = {}
    found = []

    def note(line: int, dotted: str) -> None:
        if dotted.split(".")[0] == "torch" and any(re.match(r"_(?!_)", part) for part in dotted.split(".")):
            found.append((line, dotted))

    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                alias[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]
                note(node.lineno, a.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for a in node.names:
                alias[a.asname or a.name] = f"{node.module}.{a.name}"
                note(node.lineno, f"{node.module}.{a.name}")
    for node in ast.walk(tree):
        chain, at = [], node
        while isinstance(at, ast.Attribute):
            chain.append(at.attr)
            at = at.value
        if chain and isinstance(at, ast.Name) and at.id in alias:
            note(node.lineno, ".".join((alias[at.id], *reversed(chain))))
    return found


def test_private_torch_symbols_live_in_one_file():
    found = {}
    for name, path in modules().items():
        if name != "zinf_compile._torch":
            symbols = private_torch(ast.parse(path.read_text()))
            if symbols:
                found[name] = symbols
    assert not found, f"move these to zinf_compile/_torch.py: {found}"


def test_the_detector_of_private_symbols_sees_every_spelling():
    for code in (
        "import torch._dynamo",
        "from torch._dynamo import reset",
        "from torch.fx import _symbolic_trace",
        "import torch\ntorch._C._stuff()",
        "import torch.nn as nn\nnn.modules._functions",
        "from torch import fx\nfx._compatibility.x",
    ):
        assert private_torch(ast.parse(code)), code
    assert not private_torch(ast.parse("import torch\ntorch.ops.zinf.gather.default\nx._version\ntorch.__version__"))


def test_the_import_resolver_understands_relative_imports():
    tree = ast.parse("from ..schedule import Plan\nfrom . import ops\nfrom .store import Store")
    assert {"zinf_compile.schedule", "zinf_compile.runtime.ops", "zinf_compile.runtime.store"} <= imports("zinf_compile.runtime.executor", tree, False)
    assert "zinf_compile.schedule" in imports("zinf_compile.planner", ast.parse("from ..schedule import Plan"), True)


def test_no_file_is_longer_than_500_lines():
    suffixes = {".py", ".cpp", ".h", ".cu"}
    folders = [*FOLDERS.values(), ROOT / "csrc", ROOT / "tests", ROOT / "examples"]
    sizes = {p.relative_to(ROOT): len(p.read_text().splitlines()) for f in folders for p in f.rglob("*") if p.suffix in suffixes}
    assert {p: n for p, n in sizes.items() if n > 500} == {}


def test_native_code_knows_torch_in_ops_only():
    """csrc/ops.cpp binds to torch; the CPU allocator implements a c10 interface; the engine is plain C++20."""
    wrong = []
    for path in sorted((ROOT / "csrc").iterdir()):
        if path.suffix not in {".cpp", ".h", ".cu"} or path.name == "ops.cpp":
            continue
        for target in re.findall(r'#\s*include\s*[<"]([^>"]+)', path.read_text()):
            first = target.split("/")[0]
            if first in {"torch", "ATen", "caffe2", "Python.h"} or (first == "c10" and path.stem not in C10_SOURCES):
                wrong.append((path.name, target))
    assert not wrong


QUIET_IMPORT = """
import os, sys
import torch, torch._dynamo            # what the import of the package may cost, torch's own threads included
forks = []
sys.addaudithook(lambda event, args: forks.append(event) if event.split(".")[0] == "subprocess" or event in (
    "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec") else None)
threads, forks[:] = len(os.listdir("/proc/self/task")), []
import zinf_compile
assert not forks, f"import ran a program: {forks}"
assert len(os.listdir("/proc/self/task")) == threads, "import started threads"
loaded = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
assert not [l for l in loaded if "zinf" in os.path.basename(l)], "import loaded the native engine"
print("quiet")
"""


def test_importing_the_package_builds_nothing_and_starts_nothing(tmp_path):
    child = subprocess.run([sys.executable, "-c", QUIET_IMPORT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert child.stdout.strip() == "quiet", child.stderr[-2000:]
