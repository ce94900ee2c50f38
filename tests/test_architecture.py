"""Who reads one package must not need all others: imports follow one table, without circles."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from tests import architecture
from tests.architecture import PACKAGES, ROOT

FILES = architecture.imports_of_files()
LONGEST_FILE, LONGEST_FUNCTION, LONG_FUNCTION = 400, 60, 40


def test_every_file_belongs_to_a_package_of_the_table() -> None:
    known = {package.name for package in PACKAGES} | {"trainer/__init__.py"}
    assert {architecture.package_of(file) for file in FILES} == known


def test_the_table_has_at_most_24_packages_without_a_circle() -> None:
    assert len(PACKAGES) <= 24
    assert architecture.circles({p.name: set(p.may_import) for p in PACKAGES}) == []


def test_a_package_imports_what_the_table_allows() -> None:
    allowed = {package.name: set(package.may_import) for package in PACKAGES}
    imported = architecture.imports_of_packages(FILES)
    wrong = {
        f"{package} imports {other}"
        for package, others in imported.items()
        for other in others - allowed.get(package, set()) - {"trainer/__init__.py"}
    }
    assert wrong == set()


def test_no_file_imports_itself_through_others() -> None:
    assert architecture.circles(FILES) == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert architecture.circles(graph) == [["a", "b", "c"]]


@pytest.mark.parametrize("package", [p.name for p in PACKAGES if not p.torch])
def test_a_package_of_the_login_node_loads_no_torch(package: str) -> None:
    modules = [
        file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in FILES
        if architecture.package_of(file) == package and not file.endswith("__main__.py")
    ]
    code = (
        f"import importlib, sys\nfor name in {modules}:\n    importlib.import_module(name)\n"
        "loaded = {'torch', 'deepspeed', 'transformers', 'vllm'} & set(sys.modules)\n"
        "sys.exit(', '.join(loaded) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_table_of_the_docs_is_the_one_that_is_tested() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    assert architecture.table() in page, "paste the output of: python -m tests.architecture"


def test_files_and_functions_stay_short() -> None:
    lengths = {file: len((ROOT / file).read_text().splitlines()) for file in FILES}
    assert {file: n for file, n in lengths.items() if n > LONGEST_FILE} == {}
    functions = {
        f"{file}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for file in FILES
        for node in ast.walk(ast.parse((ROOT / file).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    }
    assert {name: n for name, n in functions.items() if n > LONGEST_FUNCTION} == {}
    long = {name: n for name, n in functions.items() if n > LONG_FUNCTION}
    assert len(long) <= len(functions) / 100, long
