"""What the layout promises: imports go down, the core knows no framework, public names are the documented ones.

Everything is read off the source (AST), so that a module that cannot be imported here is checked all the same.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvboost_rag"
INTEGRATIONS = ROOT / "integrations"

# First part below kvboost_rag → level. A module imports its own part, or a part of a lower level.
LEVELS = {
    "errors": 0,
    "keys": 1, "config": 1, "once": 1, "chunk": 1, "fingerprint": 1,
    "data": 1, "plan": 1,
    "kv": 2,
    "store": 3,
    "model": 4,
    "engine": 5,
    "warmup": 6, "verify": 6,
    "aio": 6, "constrain": 6, "loading": 6, "metrics": 6, "toolcalls": 6,
    "answers": 7,
    "api": 8,
    "registry": 9,
    "": 10,
    "cli": 11,
    "__main__": 12,
}  # fmt: skip
SIDEWAYS = {("fingerprint", "keys")}  # same level, allowed
FORBIDDEN = {("model", "store")}  # lower level, but none of its business

FRAMEWORKS = ("langchain", "llama_index", "ray", "pandas", "langchain_kvboost_rag")
# import name → name of the distribution, where they differ
DISTRIBUTIONS = {
    "bs4": "beautifulsoup4", "langchain_core": "langchain-core", "langchain_text_splitters": "langchain-text-splitters",
    "flash_attn": "flash-attn", "botocore": "boto3", "tokenizers": "transformers", "huggingface_hub": "transformers",
    "llama_index": "llama-index-core",
}  # fmt: skip
# Used only where they are installed already, never asked for.
NEVER_REQUIRED = {"peft", "gptqmodel", "autoawq_kernels", "awq_ext", "gptqmodel_awq_kernels", "triton", "kernels"}
# Measure one part alone, and therefore import it.
MICRO_BENCHMARKS = {
    "benchmarks/attention.py",
    "benchmarks/match.py",
    "benchmarks/overlap.py",
    "benchmarks/store.py",
    "benchmarks/store_real.py",
    "benchmarks/gpu_check.py",
    "benchmarks/gpu_machine.py",
    "benchmarks/gpu_models.py",
    "benchmarks/gpu_parts.py",
    "benchmarks/gpu_reuse.py",
}
MAX_LINES = 300


def python_files(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*.py") if "__pycache__" not in f.parts)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, *, whole_file: bool = True) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything imported; ``whole_file=False``: only what runs when the module is imported."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if whole_file else _executed_on_import(tree.body)
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            for alias in node.names:
                yield f"{base}.{alias.name}", node.lineno


def _executed_on_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        for name in ("body", "orelse", "finalbody", "handlers"):
            children = getattr(node, name, [])
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                yield from _executed_on_import(children)


def part_of(name: str) -> str:
    """The part below kvboost_rag that a dotted name belongs to; "" for the package itself."""
    parts = name.split(".")
    found = parts[1] if len(parts) > 1 else ""
    exists = (PACKAGE / found).is_dir() or (PACKAGE / f"{found}.py").is_file()
    return found if found in LEVELS or exists else ""


def internal_imports(path: Path) -> Iterator[tuple[str, int]]:
    for name, line in imports_of(path):
        if name.split(".")[0] == "kvboost_rag":
            yield part_of(name), line


def public_names() -> list[str] | None:
    """``kvboost_rag.__all__``, or None while there is no facade."""
    file = PACKAGE / "__init__.py"
    if not file.is_file():
        return None
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return [ast.literal_eval(e) for e in node.value.elts]  # type: ignore[attr-defined]
    return None


# --- direction ----------------------------------------------------------------------------------------------


def test_every_part_has_a_level() -> None:
    parts = {part_of(module_of(f)) for f in python_files(PACKAGE)}
    assert parts <= set(LEVELS), f"give these a level in {relative(Path(__file__))}: {sorted(parts - set(LEVELS))}"


def test_imports_go_down_only() -> None:
    wrong = []
    for file in python_files(PACKAGE):
        own = part_of(module_of(file))
        for other, line in internal_imports(file):
            down = LEVELS.get(other, 99) < LEVELS.get(own, -1) and (own, other) not in FORBIDDEN
            if not (own == other or down or (own, other) in SIDEWAYS):
                wrong.append(f"{relative(file)}:{line}: {own or 'kvboost_rag'} imports {other or 'kvboost_rag'}")
    assert not wrong, "\n".join(wrong)


def test_the_checker_sees_an_upward_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "kvboost_rag"
    (fake / "kv").mkdir(parents=True)
    (fake / "kv" / "bad.py").write_text("def f():\n    from ..engine import compose\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", fake)
    with pytest.raises(AssertionError, match="kv imports engine"):
        test_imports_go_down_only()


def test_core_imports_no_framework_when_imported() -> None:
    wrong = [
        f"{relative(file)}:{line}: {name}"
        for file in python_files(PACKAGE)
        for name, line in imports_of(file, whole_file=False)
        if any(name.split(".")[0] == f or name.startswith(f"{f}_") for f in FRAMEWORKS)
    ]
    assert not wrong, "\n".join(wrong)


def test_core_never_imports_integrations_tests_or_benchmarks() -> None:
    above = {"integrations", "langchain_kvboost_rag", "tests", "benchmarks"}
    files = python_files(PACKAGE)
    assert not [f"{relative(f)}: {n}" for f in files for n, _ in imports_of(f) if n.split(".")[0] in above]


def test_no_pickle_in_the_package() -> None:
    wrong = [
        f"{relative(f)}:{line}"
        for f in [*python_files(PACKAGE), *python_files(INTEGRATIONS)]
        for name, line in imports_of(f)
        if name.split(".")[0] in {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["integrations", "benchmarks", "notebooks"])
def test_what_stands_above_uses_public_names_only(folder: str) -> None:
    names = public_names()
    if names is None:
        pytest.skip("kvboost_rag/__init__.py has no __all__ yet")
    allowed = {"kvboost_rag", *(f"kvboost_rag.{name}" for name in [*names, "__version__", "errors"])}
    wrong = [
        f"{relative(file)}:{line}: {name}"
        for file in python_files(ROOT / folder)
        if relative(file) not in MICRO_BENCHMARKS
        for name, line in imports_of(file)
        if name.split(".")[0] == "kvboost_rag" and name not in allowed and not name.startswith("kvboost_rag.errors.")
    ]
    assert not wrong, "\n".join(wrong)


# --- public names and dependencies --------------------------------------------------------------------------


def test_public_names_exist() -> None:
    names = public_names()
    if names is None:
        pytest.skip("kvboost_rag/__init__.py has no __all__ yet")
    import kvboost_rag

    missing = [name for name in names if not hasattr(kvboost_rag, name)]
    assert not missing
    assert len(set(names)) == len(names)


def test_public_names_are_the_documented_ones() -> None:
    names = public_names()
    pages = [p for p in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if p.is_file() and p.name != "log.md"]
    text = "\n".join(p.read_text(encoding="utf-8") for p in pages)
    if names is None or not (ROOT / "README.md").is_file():
        pytest.skip("no facade or no README.md yet")
    undocumented = [n for n in names if n != "__version__" and not re.search(rf"\b{re.escape(n)}\b", text)]
    assert not undocumented, f"public, but in no page: {undocumented}"
    shown: set[str] = set()
    for match in re.finditer(r"^\s*from kvboost_rag import \(?([\w ,\n]+)", text, re.MULTILINE):
        shown |= {n.split(" as ")[0].strip() for n in match[1].split("\n")[0].split(",") if n.strip()}
    assert shown <= set(names), f"documented, but not public: {sorted(shown - set(names))}"


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def bare(requirements: list[str]) -> set[str]:
        return {re.split(r"[^\w.-]", r)[0].lower().replace("_", "-") for r in requirements}

    core = bare(project["dependencies"])
    extras = {name for group in project["optional-dependencies"].values() for name in bare(group)}
    wrong = []
    for file in python_files(PACKAGE):
        on_import = {name for name, _ in imports_of(file, whole_file=False)}
        for name, line in imports_of(file):
            top = name.split(".")[0]
            if top in sys.stdlib_module_names or top in {"kvboost_rag", *NEVER_REQUIRED}:
                continue
            distribution = DISTRIBUTIONS.get(top, top).lower().replace("_", "-")
            if distribution not in (core if name in on_import else core | extras):
                wrong.append(f"{relative(file)}:{line}: {top}")
    assert not wrong, "not declared in pyproject.toml (core for imports at the top of a module):\n" + "\n".join(wrong)


def test_import_of_the_package_is_light() -> None:
    """``import kvboost_rag`` (help pages, completion, error classes) loads neither torch nor transformers."""
    if public_names() is None:
        pytest.skip("no facade yet")
    code = "import sys, kvboost_rag; print(*sorted({'torch', 'transformers', 'diskcache'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


# --- tests and tree -----------------------------------------------------------------------------------------


def _collects(file: Path) -> bool:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test"):
            return True
        # Hypothesis state machines and standard suites bring their tests with their base class.
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test") and node.bases:
            return True
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id.startswith("Test") for t in node.targets
        ):
            return True
    return False


def test_every_test_file_collects_something() -> None:
    tests = [f for f in python_files(ROOT / "tests") if f.name.startswith("test_") or f.name.endswith("_test.py")]
    empty = [relative(f) for f in tests if not _collects(f)]
    assert not empty, f"nothing that pytest would run: {empty}"


def test_no_test_hides_in_a_file_that_pytest_does_not_collect() -> None:
    hidden = []
    for file in python_files(ROOT / "tests"):
        if file.name.startswith("test_") or file.name.endswith("_test.py"):
            continue
        top = ast.parse(file.read_text(encoding="utf-8")).body
        if any(isinstance(n, ast.FunctionDef) and n.name.startswith("test_") for n in top):
            hidden.append(relative(file))
    assert not hidden, f"rename to test_*.py: {hidden}"


def repository_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.decode().split("\0") if name and (ROOT / name).is_file()]


def test_nothing_names_a_workplace_or_a_registry() -> None:
    # Built from parts, so that this file does not find itself.
    patterns = ["/" + "work/", "/" + "opt/pypi", "pypi" + ".org", "pythonhosted" + ".org", "download.pytorch" + ".org"]
    wrong = []
    for file in repository_files():
        text = file.read_bytes().decode("utf-8", errors="ignore")
        wrong += [f"{relative(file)}: {pattern}" for pattern in patterns if pattern in text]
    assert not wrong, "\n".join(wrong)


def test_file_sizes_are_reported() -> None:
    """A report for review, not a limit: files beyond 300 lines are listed as a warning."""
    files = [*python_files(PACKAGE), *python_files(INTEGRATIONS)]
    long = {relative(f): n for f in files if (n := len(f.read_text(encoding="utf-8").splitlines())) > MAX_LINES}
    if long:
        warnings.warn(f"longer than {MAX_LINES} lines: {long}", stacklevel=1)
    assert files
