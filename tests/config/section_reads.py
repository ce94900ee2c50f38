"""Which keys the code reads: attribute reads on values whose class is a section of the schema.

A small type inference over the syntax trees. It knows the class of a value from annotations of
parameters, variables, attributes and return values, and follows assignments, loops, constructors
and the attributes of sections. A read on a value of unknown class does not count, so no key passes
because another section has one of the same name. ``**section.model_dump()`` reads all keys of the
section: they become arguments by name.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config.keys.fields import section_of
from trainer.config.schema import Config

Types = frozenset[str]
"""Dotted names of classes; ``type:NAME`` is the class itself rather than a value of it."""
NOTHING: Types = frozenset()
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCHEMA = "trainer.config.schema"


def sections(model: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Dotted name of each section class (all as if ``trainer.config.schema`` defined them)."""
    found = {f"{SCHEMA}.{model.__name__}": model}
    for item in model.model_fields.values():
        inner = section_of(item)
        if inner is not None:
            found |= sections(inner)
    return found


def unread_keys(
    sources: Mapping[str, str], model: type[BaseModel] = Config
) -> dict[str, FieldInfo]:
    """The keys of ``model`` that no module reads, with their fields. ``sources``: dotted module
    name -> source.
    """
    reads = section_reads(sources, model)

    def walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
        for name, item in section.model_fields.items():
            inner = section_of(item)
            if inner is not None:
                yield from walk(inner, f"{prefix}{name}.")
            elif (section.__name__, name) not in reads:
                yield f"{prefix}{name}", item

    return dict(walk(model, ""))


def section_reads(
    sources: Mapping[str, str], model: type[BaseModel] = Config
) -> set[tuple[str, str]]:
    """(section, field) of every attribute read in ``sources``."""
    program = Program(sections(model))
    modules = [Module(name, ast.parse(text), program) for name, text in sources.items()]
    for _ in range(3):  # a value may pass through classes that are read later
        for module in modules:
            module.infer()
    return program.reads


def sources_of(root: Path, *folders: str) -> dict[str, str]:
    """Dotted module name -> source of all modules in ``folders``, without the schema's own."""
    found = {}
    for folder in folders:
        for path in (root / folder).rglob("*.py"):
            name = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
            if not f"{name}.".startswith(f"{SCHEMA}."):
                found[name] = path.read_text(encoding="utf-8")
    return found


@dataclass
class Program:
    """What is known of all modules."""

    sections: dict[str, type[BaseModel]]
    names: dict[str, str] = field(default_factory=dict)
    """Dotted name of an imported name -> the name that it stands for."""
    classes: dict[str, list[str]] = field(default_factory=dict)
    """Class -> its base classes."""
    returns: dict[str, Types] = field(default_factory=dict)
    """Function or method -> what it returns."""
    attributes: dict[str, Types] = field(default_factory=lambda: defaultdict(frozenset))
    """``module.Class.name`` or ``module.name`` -> what it holds."""
    reads: set[tuple[str, str]] = field(default_factory=set)

    def resolve(self, name: str) -> str:
        """The dotted name where ``name`` is defined."""
        for _ in range(8):
            if name not in self.names:
                break
            name = self.names[name]
        module, _, last = name.rpartition(".")
        if module == "trainer.config" or module.startswith(SCHEMA):
            return f"{SCHEMA}.{last}" if f"{SCHEMA}.{last}" in self.sections else name
        return name

    def attribute(self, base: Types, name: str) -> Types:
        """What ``base.name`` is. Notes the read when ``base`` is a section."""
        found = NOTHING
        for kind in base:
            kind = kind.removeprefix("type:")
            section = self.sections.get(kind)
            if section is None:
                for owner in [kind, *self.classes.get(kind, ())]:
                    found |= self.attributes.get(f"{owner}.{name}", NOTHING)
            elif name in section.model_fields:
                self.reads.add((section.__name__, name))
                inner = section_of(section.model_fields[name])
                if inner is not None:
                    found |= {f"{SCHEMA}.{inner.__name__}"}
        return found

    def method(self, base: Types, name: str) -> Types:
        """What the call ``base.name(...)`` returns."""
        if name == "model_copy":
            return base
        found = NOTHING
        for kind in base:
            kind = kind.removeprefix("type:")
            for owner in [kind, *self.classes.get(kind, ())]:
                found |= self.returns.get(f"{owner}.{name}", NOTHING)
        return found


class Module:
    """One module: its names, and the inference over its functions.

    ``scope``: variable -> its classes. ``owner``: where a statement stands, as ``module``,
    ``module.Class`` or, with brackets at its end, ``module.function()``.
    """

    def __init__(self, name: str, tree: ast.Module, program: Program) -> None:
        self._name, self._tree, self._program = name, tree, program
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    target = f"{node.module}.{alias.name}"
                    program.names[f"{name}.{alias.asname or alias.name}"] = target
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.asname:
                        program.names[f"{name}.{alias.asname}"] = alias.name
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                program.classes[f"{name}.{node.name}"] = []
                program.names.pop(f"{name}.{node.name}", None)

    def infer(self) -> None:
        """One pass over the module."""
        scope: dict[str, Types] = {}
        self._block(self._tree.body, scope, self._name)

    def _block(self, body: Iterable[ast.stmt], scope: dict[str, Types], owner: str) -> None:
        for statement in body:
            self._statement(statement, scope, owner)

    def _statement(self, node: ast.AST, scope: dict[str, Types], owner: str) -> None:
        if isinstance(node, ast.ClassDef):
            self._class(node, scope)
        elif isinstance(node, FUNCTIONS):
            self._function(node, scope, owner)
        elif isinstance(node, ast.AnnAssign):
            if node.value:
                self._type(node.value, scope)
            self._bind(node.target, self._annotation(node.annotation), scope, owner)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value, scope, owner)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._loop(node.target, node.iter, scope, owner)
            self._block([*node.body, *node.orelse], scope, owner)
        elif isinstance(node, ast.expr):
            self._type(node, scope)
        else:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.withitem) and child.optional_vars:
                    self._assign(child.optional_vars, child.context_expr, scope, owner)
                else:
                    self._statement(child, scope, owner)

    def _class(self, node: ast.ClassDef, scope: dict[str, Types]) -> None:
        name = f"{self._name}.{node.name}"
        bases = [kind for base in node.bases for kind in self._annotation(base)]
        inherited = [owner for base in bases for owner in self._program.classes.get(base, ())]
        self._program.classes[name] = [*bases, *inherited]
        self._block(node.body, {**scope, "self": frozenset({name}), "cls": frozenset({name})}, name)

    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef, scope: dict[str, Types], owner: str
    ) -> None:
        returned = self._annotation(node.returns)
        if returned:
            self._program.returns[f"{owner}.{node.name}"] = returned
        if any(isinstance(d, ast.Name) and "property" in d.id for d in node.decorator_list):
            self._program.attributes[f"{owner}.{node.name}"] |= returned
        inner = dict(scope)
        arguments = node.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]:
            if argument.arg not in ("self", "cls"):
                inner[argument.arg] = self._annotation(argument.annotation)
        self._block(node.body, inner, f"{owner}.{node.name}()")

    def _annotation(self, node: ast.expr | None) -> Types:
        """All classes that an annotation names, those inside ``list[...]`` and unions, too."""
        if node is None:
            return NOTHING
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return self._annotation(ast.parse(node.value, mode="eval").body)
        found = NOTHING
        for part in ast.walk(node):
            if isinstance(part, ast.Name | ast.Attribute):
                name = self._program.resolve(f"{self._name}.{ast.unparse(part)}")
                if name in self._program.sections or name in self._program.classes:
                    found |= {name}
        return found

    def _bind(self, target: ast.expr, types: Types, scope: dict[str, Types], owner: str) -> None:
        if isinstance(target, ast.Name):
            scope[target.id] = scope.get(target.id, NOTHING) | types
            if not owner.endswith("()"):
                self._program.attributes[f"{owner}.{target.id}"] |= types
        elif isinstance(target, ast.Attribute):
            for kind in self._type(target.value, scope):
                if kind in self._program.classes:
                    self._program.attributes[f"{kind}.{target.attr}"] |= types
        elif isinstance(target, ast.Tuple | ast.List):
            for part in target.elts:
                self._bind(part, types, scope, owner)

    def _assign(
        self, target: ast.expr, value: ast.expr, scope: dict[str, Types], owner: str
    ) -> None:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(value, ast.Tuple)
            and len(target.elts) == len(value.elts)
        ):
            for part, item in zip(target.elts, value.elts, strict=True):
                self._assign(part, item, scope, owner)
        else:
            self._bind(target, self._type(value, scope), scope, owner)

    def _loop(self, target: ast.expr, items: ast.expr, scope: dict[str, Types], owner: str) -> None:
        if isinstance(items, ast.Tuple | ast.List):
            for item in items.elts:
                self._assign(target, item, scope, owner)
        else:
            self._bind(target, self._type(items, scope), scope, owner)

    def _type(self, node: ast.expr, scope: dict[str, Types]) -> Types:
        """The classes that a value may have; notes every read on the way."""
        if isinstance(node, ast.Name):
            return scope.get(node.id, NOTHING) or self._global(node)
        if isinstance(node, ast.Attribute):
            base = self._type(node.value, scope)
            return self._program.attribute(base, node.attr) or self._global(node)
        if isinstance(node, ast.Call):
            return self._call(node, scope)
        if isinstance(node, ast.Lambda):
            return self._type(node.body, dict(scope))
        if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp):
            return self._comprehension(node, dict(scope))
        if isinstance(node, ast.NamedExpr):
            self._assign(node.target, node.value, scope, "()")
        found = [self._type(child, scope) for child in _parts(node)]
        followed = (ast.IfExp, ast.BoolOp, ast.Await, ast.Subscript, ast.NamedExpr, ast.Starred)
        return NOTHING.union(*found) if isinstance(node, followed) else NOTHING

    def _global(self, node: ast.expr) -> Types:
        """A class, or a variable of a module."""
        name = self._program.resolve(f"{self._name}.{ast.unparse(node)}")
        module, _, last = name.rpartition(".")
        if name in self._program.classes or name in self._program.sections:
            return frozenset({f"type:{name}"})
        return self._program.attributes.get(f"{self._program.resolve(module)}.{last}", NOTHING)

    def _call(self, node: ast.Call, scope: dict[str, Types]) -> Types:
        arguments = [self._type(child, scope) for child in _parts(node) if child is not node.func]
        for keyword in node.keywords:
            if keyword.arg is None:
                self._read_all(keyword.value, scope)
        called = node.func
        name = self._program.resolve(f"{self._name}.{ast.unparse(called)}")
        if isinstance(called, ast.Name) and called.id == "getattr" and len(node.args) > 1:
            if isinstance(node.args[1], ast.Constant):
                return self._program.attribute(arguments[0], str(node.args[1].value))
            return NOTHING
        if name in ("dataclasses.replace", "copy.copy", "copy.deepcopy"):
            return arguments[0]
        if name in self._program.returns:
            return self._program.returns[name]
        if isinstance(called, ast.Attribute):
            base = self._type(called.value, scope)
            made = self._program.method(base, called.attr)
            return made or self._instances(self._type(called, scope))
        return self._instances(self._type(called, scope))

    def _read_all(self, node: ast.expr, scope: dict[str, Types]) -> None:
        """Note a read of every key of ``section`` in ``**section.model_dump()``."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return
        if node.func.attr == "model_dump":
            base = self._type(node.func.value, scope)
            for kind in base & self._program.sections.keys():
                for name in self._program.sections[kind].model_fields:
                    self._program.attribute(base, name)

    @staticmethod
    def _instances(types: Types) -> Types:
        return frozenset(t.removeprefix("type:") for t in types if t.startswith("type:"))

    def _comprehension(
        self,
        node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp,
        scope: dict[str, Types],
    ) -> Types:
        for generator in node.generators:
            self._loop(generator.target, generator.iter, scope, "()")
            for condition in generator.ifs:
                self._type(condition, scope)
        results = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        return NOTHING.union(*(self._type(result, scope) for result in results))


def _parts(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions directly inside ``node``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        elif isinstance(child, ast.keyword | ast.FormattedValue):
            yield child.value
