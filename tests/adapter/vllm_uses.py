"""What kvferry's source files use of vLLM, found by their imports, base classes and annotations, with ``ast`` alone."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.integrations.vllm.names.checker import Definition, Function, Sources


@dataclass
class SourceFile:
    """A file, and what it imports of vLLM: by its name here, the module and the name there."""

    path: Path
    tree: ast.Module
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "SourceFile":
        """Return a file; every import of vLLM is of the form ``from vllm.x import y``."""
        found = cls(path, ast.parse(path.read_text()))
        for node in ast.walk(found.tree):
            if isinstance(node, ast.Import):
                assert not any(alias.name.partition(".")[0] == "vllm" for alias in node.names), f"{path}: import vllm"
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
                found.imported |= {each.asname or each.name: (node.module or "", each.name) for each in node.names}
        return found

    @property
    def classes(self) -> Iterator[ast.ClassDef]:
        """All classes, those within functions as well."""
        return (node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef))


def subclasses(files: list[SourceFile]) -> dict[tuple[Path, str], set[tuple[str, str]]]:
    """Return the classes of vLLM below which each of kvferry's stands, directly or through others of kvferry's."""
    found: dict[tuple[Path, str], set[tuple[str, str]]] = {}
    by_name: dict[str, set[tuple[str, str]]] = {}
    for _ in range(3):  # a class may be read before its base
        for file in files:
            for node in file.classes:
                bases = {file.imported[name] for name in map(ast.unparse, node.bases) if name in file.imported}
                bases |= {place for name in map(ast.unparse, node.bases) for place in by_name.get(name, ())}
                if bases:
                    found[file.path, node.name] = by_name[node.name] = bases
    return found


class AttributesRead:
    """The attributes of vLLM's classes that a file reads or sets, as far as annotations tell the classes.

    Known are parameters and attributes of ``self`` annotated with a class of vLLM, what is read of them where vLLM
    annotates it, and variables that are set to these.
    """

    def __init__(self, file: SourceFile, sources: Sources) -> None:
        self._file, self._sources = file, sources
        self.found: set[tuple[str, str]] = set()
        """Names of classes and attributes."""
        of_self: dict[str, Definition] = {}
        for _ in range(2):  # the constructor sets what other methods read
            for node in ast.walk(file.tree):
                if isinstance(node, ast.ClassDef):
                    of_self |= self._fields(node)
                if isinstance(node, Function):
                    self._read_function(node, of_self)

    def _fields(self, owner: ast.ClassDef) -> dict[str, Definition]:
        annotated = (
            each for each in owner.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        )
        types = {each.target.id: self._here(each.annotation) for each in annotated if isinstance(each.target, ast.Name)}
        return {name: kind for name, kind in types.items() if kind is not None}

    def _read_function(self, function: Function, of_self: dict[str, Definition]) -> None:
        every = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        types = {each.arg: self._here(each.annotation) for each in every if each.annotation is not None}
        known = {name: kind for name, kind in types.items() if kind is not None}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                self._assign(node, known, of_self)
            if isinstance(node, ast.Assert) and ast.unparse(node.test).startswith("isinstance("):
                known.pop(ast.unparse(node.test).removeprefix("isinstance(").partition(",")[0], None)
            if isinstance(node, ast.NamedExpr) and (kind := self._type(node.value, known, of_self)) is not None:
                known[node.target.id] = kind
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and (owner := self._type(node.value, known, of_self)) is not None:
                assert isinstance(owner.node, ast.ClassDef)
                is_of_enum = any("Enum" in ast.unparse(base) for base in owner.node.bases)
                if not (is_of_enum and node.attr in ("name", "value")):
                    self.found.add((owner.node.name, node.attr))

    def _assign(self, node: ast.Assign, known: dict[str, Definition], of_self: dict[str, Definition]) -> None:
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for each, value in pairs:
                kind = self._type(value, known, of_self)
                if isinstance(each, ast.Name):
                    known.pop(each.id, None)
                    if kind is not None:
                        known[each.id] = kind
                elif isinstance(each, ast.Attribute) and ast.unparse(each.value) == "self" and kind is not None:
                    of_self[each.attr] = kind

    def _type(self, node: ast.expr, known: dict[str, Definition], of_self: dict[str, Definition]) -> Definition | None:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name) and node.value.id == "self":
            return of_self.get(node.attr)
        if (owner := self._type(node.value, known, of_self)) is None:
            return None
        if (member := owner.members().get(node.attr)) is None:
            return None
        written = getattr(member.node, "annotation", None) or getattr(member.node, "returns", None)
        name = _class_named_by(written)
        return None if name is None else _if_class(member.module.find(name))

    def _here(self, annotation: ast.expr | None) -> Definition | None:
        """Return the class of vLLM that an annotation of this file means."""
        name = _class_named_by(annotation)
        if name is None or name not in self._file.imported:
            return None
        return _if_class(self._sources.find(*self._file.imported[name]))


def _if_class(found: Definition | None) -> Definition | None:
    return found if found is not None and isinstance(found.node, ast.ClassDef) else None


def _class_named_by(annotation: ast.expr | None) -> str | None:
    """Return the one name in an annotation such as ``"Request | None"``; None for any other."""
    if annotation is None:
        return None
    names = [part.strip() for part in ast.unparse(annotation).replace('"', "").replace("'", "").split("|")]
    names = [name for name in names if name != "None"]
    return names[0] if len(names) == 1 and names[0].isidentifier() else None
