"""No function of the project is written and unreachable: a feature that no setting turns on."""

from __future__ import annotations

from pathlib import Path

from tests.reachable import FOLDERS, unreached

ROOT = Path(__file__).resolve().parents[1]


def test_every_function_and_class_is_reached_by_a_command() -> None:
    assert unreached(ROOT, FOLDERS) == [], (
        "nothing calls these: make a setting reach them, or delete them"
    )


def test_what_only_imports_exports_docstrings_and_itself_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text(
        "from package.parts import forgotten, used\n__all__ = ['forgotten', 'used']\n"
    )
    (tmp_path / "package/parts.py").write_text(
        '''
def used(): return helper()
def helper(): return 1
def forgotten():
    """See forgotten."""
    return forgotten() + only_of_forgotten()
def only_of_forgotten(): return 2
@registered
def by_decorator(): return by_text
class Plugin: ...
def not_forgotten(): ...
REGISTRY = {"name": not_forgotten}
'''
    )
    (tmp_path / "package/__main__.py").write_text('used()\nload("package.parts:Plugin")\n')
    assert unreached(tmp_path, ["package"]) == [
        "package/parts.py: forgotten",
        "package/parts.py: only_of_forgotten",
    ]
