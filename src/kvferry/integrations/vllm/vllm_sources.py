"""Compares a release of vLLM with the names that kvferry uses, by vLLM's source files alone.

Nothing of vLLM is imported: an import would load its kernels, and takes many seconds. Names are followed through
imports and base classes within vLLM. A signature is compared by the names, the order and the kinds of its parameters;
of a method that kvferry overrides also by what it returns.
"""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from inspect import Parameter, Signature
from pathlib import Path

PACKAGE = "vllm"
VARIABLES = "environment_variables"
"""The table in ``vllm.envs`` whose keys can be read as names of the module."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
_ABSENT = "is not there"
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Difference:
    """What a release has otherwise than kvferry expects: ``name`` is the full name in vLLM."""

    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, found: {self.found}"


class ChangeKind(StrEnum):
    """How a release differs from the one before in a name that kvferry uses."""

    BREAKS = "breaks"
    """kvferry cannot use it any more."""
    NEW = "new"
    """A class that kvferry subclasses has a method more: vLLM may call it, and kvferry's class has the base's."""
    SIGNATURE = "signature"
    """Other parameters or another result, and kvferry's calls still fit."""
    BODY = "body"
    """Other statements under the same signature: what it does may differ."""


@dataclass(frozen=True, slots=True)
class Change:
    """One change of a release: ``name`` is the full name in vLLM."""

    kind: ChangeKind
    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Definition:
    """A definition, and the module in which it is written. ``node`` is None where a module outside of vLLM has it."""

    module: "Module | None"
    node: ast.AST | None

    @property
    def is_field(self) -> bool:
        """Whether it is read and not called: a value, or a function that is called by reading it."""
        if isinstance(self.node, Function):
            return any(name.endswith("property") for name in _decorators(self.node))
        return True


class Sources:
    """The source files of one release, below the folder that has ``vllm/``: of an environment, or an unpacked wheel."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> "Module | None":
        """Return a module; None where the release has none of this name. Raises ``SyntaxError``."""
        if name not in self._modules:
            place = self._root.joinpath(*name.split("."))
            files = (place.with_suffix(".py"), place / "__init__.py")
            path = next((path for path in files if path.is_file()), None)
            self._modules[name] = None if path is None else Module(name, path, self)
        return self._modules[name]

    def find(self, module: str, name: str) -> Definition | None:
        """Return the definition of ``name``, such as ``BlockPool.touch``, which may be imported into ``module``.

        A name below a function, as in ``set_scales.scale``, is what the function sets on its first parameter.
        """
        outer, *inner = name.split(".")
        found = None if (place := self.module(module)) is None else place.find(outer)
        for member in inner:
            if found is None or not isinstance(found.node, ast.ClassDef | Function) or found.module is None:
                return None
            found = found.module.members(found.node).get(member)
        return found

    def differences(
        self, used: Mapping[str, Sequence[str]], overridden: Mapping[str, Sequence[str]]
    ) -> Iterator[Difference]:
        """Yield what this release has otherwise; see :mod:`kvferry.integrations.vllm.vllm_names` for both lists."""
        for module, entries in used.items():
            for entry in entries:
                yield from self._of_entry(module, Entry.parse(entry), _problem_of_call)
        for module, entries in overridden.items():
            listed = list(map(Entry.parse, entries))
            for each in listed:
                yield from self._of_entry(module, each, _problem_of_override)
            yield from self._of_abstract(module, listed)

    def _of_entry(
        self, module: str, entry: "Entry", problem_of: Callable[["Entry", Definition], str]
    ) -> Iterator[Difference]:
        found = self.find(module, entry.name)
        if found is None:
            yield Difference(f"{module}.{entry.name}", entry.text, _ABSENT)
        elif entry.function is None:
            if not found.is_field:
                yield Difference(f"{module}.{entry.name}", "a value", "is a function")
        elif found.node is not None and (problem := problem_of(entry, found)):
            yield Difference(f"{module}.{entry.name}", entry.text, problem)

    def _of_abstract(self, module: str, entries: Sequence["Entry"]) -> Iterator[Difference]:
        """Yield the methods that a subclass must have by now and kvferry's have not."""
        names = {entry.name for entry in entries}
        for owner in dict.fromkeys(name.partition(".")[0] for name in names):
            found = self.find(module, owner)
            if found is None or found.module is None or not isinstance(found.node, ast.ClassDef):
                continue
            for name, member in found.module.members(found.node).items():
                is_abstract = isinstance(member.node, Function) and "abstractmethod" in _decorators(member.node)
                if is_abstract and f"{owner}.{name}" not in names:
                    yield Difference(f"{module}.{owner}.{name}", "nothing", "is abstract: every subclass must have it")


def changes(
    before: Sources, after: Sources, used: Mapping[str, Sequence[str]], overridden: Mapping[str, Sequence[str]]
) -> Iterator[Change]:
    """Yield what ``after`` has otherwise than ``before``, of the names of both lists: breaking changes first."""
    broken = list(after.differences(used, overridden))
    for each in broken:
        yield Change(ChangeKind.BREAKS, each.name, each.expected, each.found)
    names = {each.name for each in broken}
    for module, entries in overridden.items():
        for owner in dict.fromkeys(Entry.parse(entry).name.partition(".")[0] for entry in entries):
            yield from _new_methods(module, owner, before, after)
    found: list[Change] = []
    for module, entries in (*used.items(), *overridden.items()):
        for entry in map(Entry.parse, entries):
            if f"{module}.{entry.name}" not in names:
                found += _harmless(
                    f"{module}.{entry.name}", before.find(module, entry.name), after.find(module, entry.name)
                )
    yield from sorted(found, key=lambda change: change.kind is ChangeKind.BODY)


def _new_methods(module: str, owner: str, before: Sources, after: Sources) -> Iterator[Change]:
    old, new = (_methods(sources.find(module, owner)) for sources in (before, after))
    for name in sorted(new.keys() - old.keys()) if old else ():
        signature = signature_of(new[name])
        words = "a value" if signature is None else _in_words(signature)
        yield Change(ChangeKind.NEW, f"{module}.{owner}.{name}", _ABSENT, words)


def _methods(found: Definition | None) -> dict[str, Definition]:
    """Return the functions of a class, and those of its base classes."""
    if found is None or found.module is None or not isinstance(found.node, ast.ClassDef):
        return {}
    members = found.module.members(found.node)
    return {name: each for name, each in members.items() if isinstance(each.node, Function)}


def _harmless(name: str, old: Definition | None, new: Definition | None) -> Iterator[Change]:
    """Yield how a name has changed that kvferry can still use."""
    if old is None or new is None or old.node is None or new.node is None or isinstance(old.node, ast.ClassDef):
        return
    signatures = [signature_of(each) for each in (old, new)]
    texts = [f"{_in_words(each)} -> {each.return_annotation}" if each is not None else "" for each in signatures]
    if texts[0] != texts[1]:
        yield Change(ChangeKind.SIGNATURE, name, *(text.replace(f" -> {Signature.empty}", "") for text in texts))
    elif _code(old.node) != _code(new.node):
        yield Change(ChangeKind.BODY, name, *(_size(each.node) for each in (old, new)))


def _code(node: ast.AST) -> str:
    """Return the statements of a definition without its texts for people."""
    if (
        isinstance(node, Function)
        and isinstance(node.body[0], ast.Expr)
        and isinstance(node.body[0].value, ast.Constant)
    ):
        node = ast.Module(node.body[1:], [])
    return ast.dump(node)


def _size(node: ast.AST | None) -> str:
    """Return how many lines a function has; of any other definition the text."""
    if isinstance(node, Function):
        return f"{(node.end_lineno or node.lineno) - node.lineno + 1} lines"
    return "" if node is None else ast.unparse(node)


class Module:
    """One source file."""

    def __init__(self, name: str, path: Path, sources: Sources) -> None:
        self.name = name
        self._path = path
        self._sources = sources
        self._members: dict[ast.ClassDef | Function, dict[str, Definition]] = {}

    @cached_property
    def _tree(self) -> ast.Module:
        return ast.parse(self._path.read_text(encoding="utf-8"))

    @cached_property
    def _names(self) -> dict[str, ast.AST]:
        """What the module's own statements define; an import under the name that it gives."""
        names: dict[str, ast.AST] = {}
        for statement in _statements(self._tree.body):
            for name in _names_defined_by(statement):
                # The last overload is the function itself. An import for type checkers is no definition.
                if name not in names or not isinstance(statement, ast.Import | ast.ImportFrom):
                    names[name] = statement
        if isinstance(table := getattr(names.get(VARIABLES), "value", None), ast.Dict):
            named = zip(table.keys, table.values, strict=True)
            names.update((str(key.value), value) for key, value in named if isinstance(key, ast.Constant))
        return names

    def find(self, name: str, following: frozenset[str] = frozenset()) -> Definition | None:
        """Return the definition of a name of this module, in the module to which imports lead."""
        if self.name in following:
            return None
        statement = self._names.get(name)
        if isinstance(statement, ast.ImportFrom):
            return self._imported(statement, name, following | {self.name})
        if isinstance(statement, ast.Import):
            return Definition(None, None)
        if statement is not None:
            return Definition(self, statement)
        for each in self._names.values():
            if isinstance(each, ast.ImportFrom) and each.names[0].name == "*":
                found = self._imported(each, name, following | {self.name})
                if found is not None and found.node is not None:
                    return found
        if (submodule := self._sources.module(f"{self.name}.{name}")) is not None:
            return Definition(submodule, submodule._tree)
        return None

    def _imported(self, statement: ast.ImportFrom, name: str, following: frozenset[str]) -> Definition | None:
        origin = self._absolute(statement)
        if origin.partition(".")[0] != PACKAGE:
            return Definition(None, None)
        original = next((alias.name for alias in statement.names if (alias.asname or alias.name) == name), name)
        module = self._sources.module(origin)
        return None if module is None else module.find(original, following)

    def _absolute(self, statement: ast.ImportFrom) -> str:
        """Return the full name of the module from which a statement imports."""
        if not statement.level:
            return statement.module or ""
        package = self.name if self._path.name == "__init__.py" else self.name.rpartition(".")[0]
        for _ in range(statement.level - 1):
            package = package.rpartition(".")[0]
        return f"{package}.{statement.module}" if statement.module else package

    def members(self, owner: ast.ClassDef | Function) -> dict[str, Definition]:
        """Return what a class and its base classes within vLLM define, attributes of ``self`` as well.

        Of a function: what it sets on its first parameter.
        """
        if owner not in self._members:
            found: dict[str, Definition] = {}
            self._members[owner] = found
            if isinstance(owner, Function):
                first = next((each.arg for each in owner.args.args), "")
                found.update((name, Definition(self, node)) for name, node in _attributes_set(owner, first))
                return found
            for base in reversed(self.bases(owner)):
                assert base.module is not None
                assert isinstance(base.node, ast.ClassDef)
                found.update(base.module.members(base.node))
            for name, statement in _attributes_set(owner, "self"):
                found.setdefault(name, Definition(self, statement))
            for statement in _statements(owner.body):
                for name in _names_defined_by(statement):
                    found[name] = Definition(self, statement)
        return self._members[owner]

    def bases(self, owner: ast.ClassDef) -> list[Definition]:
        """Return the base classes within vLLM."""
        names = [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in owner.bases]
        found = [self.find(name) for name in names if "." not in name]
        return [each for each in found if each is not None and isinstance(each.node, ast.ClassDef)]

    def fields(self, owner: ast.ClassDef) -> dict[str, Parameter]:
        """Return what the constructor takes that a decorator or base class makes from a class's fields."""
        found: dict[str, Parameter] = {}
        for base in self.bases(owner):
            assert base.module is not None
            assert isinstance(base.node, ast.ClassDef)
            found.update(base.module.fields(base.node))
        settings = [*owner.keywords, *(word for each in owner.decorator_list for word in getattr(each, "keywords", ()))]
        is_by_name = any(word.arg == "kw_only" and ast.unparse(word.value) == "True" for word in settings)
        for statement in owner.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            annotation, value = ast.unparse(statement.annotation), statement.value
            given = "" if value is None else ast.unparse(value)
            if annotation.startswith("ClassVar") or "init=False" in given:
                continue
            is_required = value is None or (given.startswith("field(") and "default" not in given)
            found[statement.target.id] = Parameter(
                statement.target.id,
                Parameter.KEYWORD_ONLY if is_by_name or "kw_only=True" in given else Parameter.POSITIONAL_OR_KEYWORD,
                default=Parameter.empty if is_required else ...,
            )
        return found


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a list: a name, and a signature where the name is called."""

    text: str
    name: str
    function: Function | None

    @classmethod
    def parse(cls, text: str) -> "Entry":
        """Return the entry of a text. Raises ``SyntaxError``.

        >>> Entry.parse("BlockPool.touch(blocks)").name, Entry.parse("BlockPool.blocks").function
        ('BlockPool.touch', None)
        """
        is_async, rest = text.startswith("async "), text.removeprefix("async ")
        name, has_signature, behind = rest.partition("(")
        if not has_signature:
            return cls(text, name, None)
        [function] = ast.parse(f"{'async ' if is_async else ''}def function({behind}: ...").body
        assert isinstance(function, Function)
        return cls(text, name, function)


def signature_of(found: Definition) -> Signature | None:
    """Return the parameters of a function without ``self``, or of a class's constructor; None where nothing says."""
    if isinstance(found.node, ast.ClassDef) and found.module is not None:
        constructor = found.module.members(found.node).get("__init__")
        if constructor is not None:
            return signature_of(constructor)
        return inspect.Signature(list(found.module.fields(found.node).values()), __validate_parameters__=False)
    if not isinstance(found.node, Function):
        return None
    signature = _signature(found.node)
    is_bound = found.module is not None and found.node not in found.module._tree.body
    if is_bound and "staticmethod" not in _decorators(found.node) and signature.parameters:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    return signature


def _signature(function: Function) -> Signature:
    listed, given = function.args, []
    plain = [*listed.posonlyargs, *listed.args]
    num_required = len(plain) - len(listed.defaults)
    for index, argument in enumerate(plain):
        is_unnamed = index < len(listed.posonlyargs)
        kind = Parameter.POSITIONAL_ONLY if is_unnamed else Parameter.POSITIONAL_OR_KEYWORD
        given.append(Parameter(argument.arg, kind, default=Parameter.empty if index < num_required else ...))
    if listed.vararg is not None:
        given.append(Parameter(listed.vararg.arg, Parameter.VAR_POSITIONAL))
    for argument, default in zip(listed.kwonlyargs, listed.kw_defaults, strict=True):
        missing = Parameter.empty if default is None else ...
        given.append(Parameter(argument.arg, Parameter.KEYWORD_ONLY, default=missing))
    if listed.kwarg is not None:
        given.append(Parameter(listed.kwarg.arg, Parameter.VAR_KEYWORD))
    returned = Signature.empty if function.returns is None else _in_one_spelling(function.returns)
    return Signature(given, return_annotation=returned)


def _problem_of_call(entry: Entry, found: Definition) -> str:
    """Return why kvferry's call is no call of the function any more; nothing where it is one."""
    assert entry.function is not None
    wanted, signature = _signature(entry.function), signature_of(found)
    if signature is None:
        return "is no function"
    if isinstance(entry.function, ast.AsyncFunctionDef) != isinstance(found.node, ast.AsyncFunctionDef):
        return "is not async" if isinstance(entry.function, ast.AsyncFunctionDef) else "is async"
    positional = [name for name, each in wanted.parameters.items() if each.kind is not Parameter.KEYWORD_ONLY]
    named = {name: name for name, each in wanted.parameters.items() if each.kind is Parameter.KEYWORD_ONLY}
    try:
        bound = signature.bind(*positional, **named)
    except TypeError as error:
        return f"{_in_words(signature)} ({error})"
    passed = {name for name, each in bound.arguments.items() if signature.parameters[name].kind not in _VARIABLE}
    has_room = any(each.kind is Parameter.VAR_POSITIONAL for each in signature.parameters.values())
    if not has_room and any(bound.arguments[name] != name for name in passed):
        return f"{_in_words(signature)} (other parameters, or another order)"
    return _problem_of_answer(wanted, signature)


def _problem_of_override(entry: Entry, found: Definition) -> str:
    """Return why kvferry's method no longer answers vLLM's calls; nothing where it does."""
    assert entry.function is not None
    ours, theirs = _signature(entry.function), signature_of(found)
    if theirs is None or (isinstance(found.node, Function) and found.is_field):
        return "is no method"
    takes_more = any(each.kind is Parameter.VAR_KEYWORD for each in ours.parameters.values())
    own = [each for each in ours.parameters.values() if each.kind not in _VARIABLE]
    asked = [each for each in theirs.parameters.values() if each.kind not in _VARIABLE]
    if takes_more:
        asked = asked[: len(own)]
    # A release before may not ask for the last ones.
    is_same = [(each.name, each.kind) for each in own[: len(asked)]] == [(each.name, each.kind) for each in asked]
    if not is_same or any(each.default is Parameter.empty for each in own[len(asked) :]):
        return _in_words(theirs)
    for mine, their in zip(own, asked, strict=False):
        if their.default is not Parameter.empty and mine.default is Parameter.empty:
            return f"{_in_words(theirs)} ({mine.name} may be left out)"
    return _problem_of_answer(ours, theirs)


def _problem_of_answer(expected: Signature, found: Signature) -> str:
    """Return which other type a function returns; nothing where one of both says no type."""
    if Signature.empty in (expected.return_annotation, found.return_annotation):
        return ""
    return "" if expected.return_annotation == found.return_annotation else f"returns {found.return_annotation}"


def _in_words(signature: Signature) -> str:
    """Return a signature with ``=...`` for each default, without what it returns."""
    return str(signature.replace(return_annotation=Signature.empty)).replace("=Ellipsis", "=...")


def _in_one_spelling(annotation: ast.expr) -> str:
    """Return a type as text, without quotes.

    >>> _in_one_spelling(ast.parse("Optional['list[int]']", mode="eval").body)
    'list[int] | None'
    """
    text = ast.unparse(annotation).replace('"', "").replace("'", "")
    if text.startswith("Optional[") and text.endswith("]"):
        text = f"{text.removeprefix('Optional[')[:-1]} | None"
    return text


def _decorators(function: Function) -> set[str]:
    """Return the last words of a function's decorators."""
    calls = (each.func if isinstance(each, ast.Call) else each for each in function.decorator_list)
    return {ast.unparse(each).rpartition(".")[2] for each in calls}


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a body, those under conditions as well; of a condition for type checkers first."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _statements([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handled = [each for handler in statement.handlers for each in handler.body]
            yield from _statements([*handled, *statement.body, *statement.orelse, *statement.finalbody])
        elif isinstance(statement, ast.With):
            yield from _statements(statement.body)
        else:
            yield statement


def _names_defined_by(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.Import):
        yield from ((alias.asname or alias.name.partition(".")[0]) for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        # A star is kept by its module: there may be several.
        yield from (
            f"* of {statement.module}" if alias.name == "*" else (alias.asname or alias.name)
            for alias in statement.names
        )
    elif isinstance(statement, ast.Assign):
        targets = (each for target in statement.targets for each in ast.walk(target))
        yield from (each.id for each in targets if isinstance(each, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def _attributes_set(owner: ast.ClassDef | Function, holder: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a class or function sets on ``holder``, such as ``self``; buffers of a PyTorch module as well."""
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for each in (each for target in targets for each in ast.walk(target)):
                if (name := _attribute(each, holder)) is not None:
                    yield name, node
        elif isinstance(node, ast.Call) and _attribute(node.func, holder) == "register_buffer":
            yield from ((str(name.value), node) for name in node.args[:1] if isinstance(name, ast.Constant))


def _attribute(node: ast.AST, holder: str) -> str | None:
    """Return the attribute of ``holder`` that an expression is; None for any other expression."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == holder:
        return node.attr
    return None
