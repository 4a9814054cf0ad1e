"""The import rules of docs/structure.md, read from the source text and checked once more in a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "kernels" / "prefixonce"
HARNESS = ROOT / "harness" / "prefixbench"

_KERNEL_MODULES = [f"prefixonce.{name}" for name in ("paged", "cascade", "dense", "hopper", "merge", "attend")]

# (files that must not import, what they must not import)
RULES = {
    "kernels know no harness": ("kernels/prefixonce/**/*.py", ["prefixbench", "hydra", "plotly"]),
    "only the plugin knows SGLang": ("kernels/prefixonce/*.py", ["sglang", "prefixonce.plugin"]),
    "decisions are pure": (
        "kernels/prefixonce/{step,dispatch,layout,traffic,errors}.py",
        ["triton", *_KERNEL_MODULES],
    ),
    "the judge does not know the accused": (
        "kernels/prefixonce/reference.py",
        ["triton", *_KERNEL_MODULES],
    ),
    "kernels do not decide": (
        "kernels/prefixonce/{paged,cascade,dense,merge,hopper}.py",
        ["prefixonce.dispatch", "prefixonce.plugin"],
    ),
    "production carries no test code": ("kernels/prefixonce/plugin/**/*.py", ["prefixonce.reference", "tests"]),
    "records open on a laptop": (
        "harness/prefixbench/{record,case,store,errors}.py",
        ["torch", "sglang", "prefixbench.engines", "prefixbench.measures", "prefixbench.jobs"],
    ),
    "analysis is a function of records": (
        "harness/prefixbench/{analysis,targets}/**/*.py",
        ["torch", "sglang"]
        + [f"prefixbench.{name}" for name in ("engines", "measures", "jobs", "report", "machine.environment")],
    ),
    "a report needs runs/ alone": (
        "harness/prefixbench/report/**/*.py",
        ["torch", "sglang", "prefixbench.engines", "prefixbench.measures", "prefixbench.jobs"],
    ),
    "engines reach the plugin as users do": (
        "harness/prefixbench/engines/**/*.py",
        ["prefixbench.analysis", "prefixbench.jobs", "prefixbench.report", "prefixonce.plugin"],
    ),
    "who serves jobs knows none": (
        "harness/prefixbench/{config,machine,measures,workloads}/**/*.py",
        ["prefixbench.jobs", "prefixbench.report"],
    ),
    "the command line is a client of the rest": (
        "harness/prefixbench/{*,analysis/**/*,config/*,engines/*,jobs/*,machine/*,measures/**/*,report/**/*,targets/*}.py",
        ["prefixbench.verbs"],
    ),
    "nothing imports the tests": ("{kernels,harness}/**/*.py", ["tests", "builders"]),
}


def expand(pattern: str) -> list[Path]:
    if "{" not in pattern:
        return [path for path in ROOT.glob(pattern) if ".egg-info" not in path.as_posix()]
    head, rest = pattern.split("{", 1)
    names, tail = rest.split("}", 1)
    return [path for name in names.split(",") for path in expand(head + name + tail)]


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            pytest.fail(f"{path.relative_to(ROOT)}: relative import; write the whole module name")
    return found


def is_typing_only(path: Path, module: str) -> bool:
    """True when every import of `module` stands under `if TYPE_CHECKING:`, where it has no effect at run time."""
    tree = ast.parse(path.read_text())
    guarded: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            guarded |= {inner for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        if any(name == module or name.startswith(module + ".") for name in names) and node not in guarded:
            return False
    return True


@pytest.mark.parametrize("rule", RULES)
def test_imports_that_must_never_exist(rule: str) -> None:
    pattern, forbidden = RULES[rule]
    files = expand(pattern)
    assert files, f"no file matches {pattern}: the rule guards nothing"
    broken = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in sorted(imports(path))
        for module in forbidden
        if (name == module or name.startswith(module + ".")) and not is_typing_only(path, module)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("module", ["prefixbench.analysis", "prefixbench.record", "prefixbench.store"])
def test_importing_analysis_loads_neither_torch_nor_sglang(module: str) -> None:
    script = f"import {module}, sys; print(sorted({{'torch', 'sglang', 'triton'}} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_importing_the_kernels_needs_neither_gpu_nor_sglang() -> None:
    script = "import prefixonce, sys; print(sorted({'sglang', 'triton', 'hydra'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("root", ["kernels", "harness"])
def test_source_roots_are_not_packages(root: str) -> None:
    """`kernels/__init__.py` would shadow the package `kernels` that SGLang imports."""
    assert not (ROOT / root / "__init__.py").exists()


def test_files_stay_small() -> None:
    sizes = sorted(len(path.read_text().splitlines()) for root in (KERNELS, HARNESS) for path in root.rglob("*.py"))
    assert sizes[-1] <= 450
    assert sizes[len(sizes) // 2] < 150
    assert not [path for root in (KERNELS, HARNESS) for path in root.rglob("util*")]


def test_no_print_outside_the_command_line() -> None:
    found = [
        str(path.relative_to(ROOT))
        for root in (KERNELS, HARNESS)
        for path in root.rglob("*.py")
        if path.name != "cli.py" and path.parent.name != "verbs"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not found


def test_the_structure_page_names_every_module_and_only_those() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    folder, named = "", set()
    for line in page.splitlines():
        if line.startswith("### `"):
            folder = line.split("`")[1]
        elif line.startswith("- `") and folder:
            named.add(f"{folder}/{line.split('`')[1]}")
    roots = (KERNELS, HARNESS, ROOT / "kernels" / "platform-cpu" / "prefixonce_cpu")
    found = {str(path.relative_to(ROOT)) for root in roots for path in root.rglob("*.py") if path.name != "__init__.py"}
    assert named == found
