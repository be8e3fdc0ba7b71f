"""Reads what a release of vLLM has of the names that kvferry uses, and compares it with how kvferry uses them.

``used.txt`` lists the names. ``0.32.0.json`` and the like have each name's definition in a release that kvferry knows;
``make check-vllm`` writes them. A release is read by its source files alone: to import vLLM would load its kernels, and
takes many seconds. Names are followed through imports and base classes within vLLM.
"""

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import resolve_name
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PACKAGE = "vllm"
Function = ast.FunctionDef | ast.AsyncFunctionDef
_ENVIRONMENT = "environment_variables"
"""The table in ``vllm.envs`` whose keys can be read as names of the module."""
_OUTSIDE = "outside of vLLM"
_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_LINE = re.compile(r"(overrides )?((async )?([\w.]+)(\(.*?)?)(?: since (.+))?")
_CALLABLE = re.compile(r"(?:abstract )?(async )?(?:def|class) (\(.*?)(?:  # .*)?")


@dataclass(frozen=True, slots=True)
class Used:
    """A name of vLLM, and how kvferry uses it: ``call`` has parameters and result as :meth:`Definition.described`."""

    module: str
    name: str
    text: str
    call: str = ""
    is_overridden: bool = False
    since: tuple[int, int] | None = None

    @classmethod
    def parse(cls, module: str, line: str) -> "Used":
        """Return what a line of ``used.txt`` says. Raises ``ValueError``.

        >>> Used.parse("vllm.v1.core.block_pool", "BlockPool.touch(blocks) since 0.31").call
        'def (blocks)'
        """
        if (found := _LINE.fullmatch(line)) is None:
            raise ValueError(f"{line!r} is no name of vLLM")
        overrides, text, is_async, name, parameters, since = found.groups(default="")
        call = f"{is_async}def {parameters}" if parameters else ""
        return cls(module, name, text, call, bool(overrides), number_of(since))

    @property
    def full_name(self) -> str:
        """The name with its module."""
        return f"{self.module}.{self.name}"


def used_in(number: tuple[int, int] | None) -> list[Used]:
    """Return what kvferry uses of a version, given as ``(0, 31)``; None means all names.

    >>> names = [each.full_name for each in used_in((0, 31))]
    >>> "vllm.v1.metrics.cache_hit_source.CacheHitSource.P2P" in names, "vllm.v1.request.Request.status" in names
    (False, True)
    """
    found, module = [], ""
    for line in (FOLDER / "used.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            found.append(Used.parse(module, line.strip()))
        elif not line.startswith("#"):
            module = line
    return [each for each in found if each.since is None or number is None or each.since <= number]


def number_of(release: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version.

    >>> number_of("0.34.1rc2"), number_of("dev")
    ((0, 34), None)
    """
    found = re.match(r"(\d+)\.(\d+)", release)
    return None if found is None else (int(found[1]), int(found[2]))


def known_releases(folder: Path = FOLDER) -> list[str]:
    """Return the releases of which a folder has a file, oldest first."""
    found = [path.stem for path in folder.glob("*.json")]
    return sorted(found, key=lambda release: list(map(int, re.findall(r"\d+", release))))


def read_release(root: Path, names: Iterable[Used]) -> dict[str, str]:
    """Return, by full name, what the release in the folder that has ``vllm/`` has of the names.

    The methods of a class of which kvferry overrides some are all there. Raises ``OSError``, ``SyntaxError`` and
    ``ValueError``.
    """
    sources, found, methods = Sources(root), {}, {}
    for each in names:
        if (definition := sources.find(each.module, each.name)) is not None:
            found[each.full_name] = definition.described(is_made=bool(each.call)) + definition.body()
        outer = each.name.partition(".")[0]
        if each.is_overridden and (owner := sources.find(each.module, outer)) is not None:
            for name, member in owner.members().items():
                if isinstance(member.node, Function):
                    methods[f"{each.module}.{outer}.{name}"] = member.described()
    return methods | found


@dataclass(frozen=True, slots=True)
class Difference:
    """What a release has otherwise than kvferry expects: ``name`` is the full name in vLLM."""

    name: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.name}: expected {self.expected}, found: {self.found}"


def differences(names: Sequence[Used], release: Mapping[str, str]) -> Iterator[Difference]:
    """Yield what a release, as :func:`read_release` returns it, has otherwise than kvferry uses it."""
    for each in names:
        text = release.get(each.full_name)
        if text is None:
            yield Difference(each.full_name, each.text, "is not there")
        elif not each.call and "def (" in text and _CALLABLE.fullmatch(text):
            yield Difference(each.full_name, "a value", "is a function")
        elif each.call and text != _OUTSIDE and (problem := _problem(each, text)):
            yield Difference(each.full_name, each.text, problem)
    for name in sorted(release.keys() - {each.full_name for each in names}):
        if release[name].startswith("abstract "):
            yield Difference(name, "nothing", "is abstract: every subclass must have it")


def _problem(used: Used, text: str) -> str:
    """Return why kvferry's function and vLLM's do not fit; nothing where they do."""
    wanted, found = _CALLABLE.fullmatch(used.call), _CALLABLE.fullmatch(text)
    if wanted is None or found is None or (used.is_overridden and text.startswith("class")):
        return "is no method" if used.is_overridden else "is no function"
    if wanted[1] != found[1]:
        return "is not async" if wanted[1] else "is async"
    ours, theirs = _signature_of(wanted[2]), _signature_of(found[2])
    problem = _problem_of_override(ours, theirs) if used.is_overridden else _problem_of_call(ours, theirs)
    returned = (ours.return_annotation, theirs.return_annotation)
    if problem:
        return f"{_parameters(theirs)} ({problem})"
    return "" if Signature.empty in returned or returned[0] == returned[1] else f"returns {returned[1]}"


def _problem_of_call(ours: Signature, theirs: Signature) -> str:
    positional = [name for name, each in ours.parameters.items() if each.kind is not Parameter.KEYWORD_ONLY]
    named = {name: name for name, each in ours.parameters.items() if each.kind is Parameter.KEYWORD_ONLY}
    try:
        bound = theirs.bind(*positional, **named).arguments
    except TypeError as error:
        return str(error)
    kinds = {name: each.kind for name, each in theirs.parameters.items()}
    is_moved = any(bound[name] != name for name in bound if kinds[name] not in _VARIABLE)
    return "other parameters, or another order" if is_moved and Parameter.VAR_POSITIONAL not in kinds.values() else ""


def _problem_of_override(ours: Signature, theirs: Signature) -> str:
    own, asked = ([p for p in each.parameters.values() if p.kind not in _VARIABLE] for each in (ours, theirs))
    if any(each.kind is Parameter.VAR_KEYWORD for each in ours.parameters.values()):
        asked = asked[: len(own)]
    # A release before may not ask for the last ones.
    is_same = [(each.name, each.kind) for each in own[: len(asked)]] == [(each.name, each.kind) for each in asked]
    if not is_same or any(each.default is Parameter.empty for each in own[len(asked) :]):
        return f"kvferry's has {_parameters(ours)}"
    for mine, their in zip(own, asked, strict=False):
        if their.default is not Parameter.empty and mine.default is Parameter.empty:
            return f"{mine.name} may be left out"
    return ""


def _signature_of(parameters: str) -> Signature:
    [function] = ast.parse(f"def function{parameters}: ...").body
    assert isinstance(function, Function)
    return signature(function)


def signature(function: Function) -> Signature:
    """Return a function's signature; each default is an ellipsis, and the types of parameters are left out."""
    listed, by_name = function.args, zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    plain: list[tuple[str, Any]] = [(each.arg, Parameter.POSITIONAL_ONLY) for each in listed.posonlyargs]
    plain += [(each.arg, Parameter.POSITIONAL_OR_KEYWORD) for each in listed.args]
    num_required = len(plain) - len(listed.defaults)
    given = [_parameter(name, kind, index < num_required) for index, (name, kind) in enumerate(plain)]
    if listed.vararg is not None:
        given.append(Parameter(listed.vararg.arg, Parameter.VAR_POSITIONAL))
    given += [_parameter(each.arg, Parameter.KEYWORD_ONLY, default is None) for each, default in by_name]
    if listed.kwarg is not None:
        given.append(Parameter(listed.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(given, return_annotation=Signature.empty if function.returns is None else _type(function.returns))


def _parameter(name: str, kind: Any, is_required: bool) -> Parameter:
    return Parameter(name, kind, default=Parameter.empty if is_required else ...)


def _parameters(signature: Signature) -> str:
    return str(signature.replace(return_annotation=Signature.empty)).replace("=Ellipsis", "=...")


def _type(annotation: ast.expr) -> str:
    """Return a type as text, without quotes."""
    return re.sub("[\"']", "", ast.unparse(annotation))


@dataclass(frozen=True, slots=True)
class Definition:
    """A definition, and the module in which it is written."""

    module: "Module"
    node: ast.AST

    def described(self, *, is_made: bool = False) -> str:
        """Return the definition in one line; of a class that kvferry makes with the constructor's parameters.

        A function has its parameters without ``self`` and types, ``=...`` for each default, and what it returns.
        """
        node = self.node
        if isinstance(node, ast.Import | ast.ImportFrom):
            return _OUTSIDE
        if isinstance(node, ast.ClassDef):
            return f"class {_parameters(self._constructor())}" if is_made else "class"
        if not isinstance(node, Function):
            return "module" if isinstance(node, ast.Module) else f"value {ast.unparse(node)}"
        decorators, returned = self._decorators(), "" if node.returns is None else f" -> {_type(node.returns)}"
        prefix = "abstract " if "abstractmethod" in decorators else ""
        if any(name.endswith("property") for name in decorators):
            return f"{prefix}property{returned}"
        prefix += "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        return f"{prefix} {_parameters(self._signature())}{returned}"

    def body(self) -> str:
        """Return how many lines of code a function has, and a digest of them; nothing of any other definition."""
        if not isinstance(self.node, Function):
            return ""
        first = self.node.body[0]
        has_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        begin = first.end_lineno if has_text else first.lineno - 1
        lines = [line.strip() for line in self.module.lines[begin : self.node.end_lineno]]
        code = [line for line in lines if line and not line.startswith("#")]
        digest = hashlib.sha256("\n".join(code).encode()).hexdigest()[:8]
        return f"  # {len(code)} lines, {digest}"

    def members(self) -> "dict[str, Definition]":
        """Return what a class and its base classes within vLLM define, attributes of ``self`` as well.

        Of a function: what it sets on its first parameter.
        """
        node, found = self.node, self.module.members
        if node not in found and isinstance(node, Function):
            first = next((each.arg for each in node.args.args), "")
            found[node] = {name: Definition(self.module, each) for name, each in _attributes_set(node, first)}
        elif node not in found and isinstance(node, ast.ClassDef):
            found[node] = {name: member for base in self.bases() for name, member in base.members().items()}
            for name, statement in _attributes_set(node, "self"):
                found[node].setdefault(name, Definition(self.module, statement))
            for name, statement in _defined(node.body):
                found[node][name] = Definition(self.module, statement)
        return found.get(node, {})

    def bases(self) -> "list[Definition]":
        """Return the base classes within vLLM, last first."""
        assert isinstance(self.node, ast.ClassDef)
        names = [ast.unparse(base.value if isinstance(base, ast.Subscript) else base) for base in self.node.bases]
        found = [self.module.find(name) for name in reversed(names) if "." not in name]
        return [each for each in found if each is not None and isinstance(each.node, ast.ClassDef)]

    def _signature(self) -> Signature:
        assert isinstance(self.node, Function)
        found = signature(self.node)
        is_method = self.node not in self.module.tree.body and "staticmethod" not in self._decorators()
        return found.replace(parameters=list(found.parameters.values())[1:]) if is_method else found

    def _constructor(self) -> Signature:
        constructor = self.members().get("__init__")
        if constructor is not None and isinstance(constructor.node, Function):
            return constructor._signature()
        return Signature(sorted(self._fields().values(), key=lambda each: each.kind))

    def _fields(self) -> dict[str, Parameter]:
        """Return what a constructor takes that a decorator or base class makes from a class's fields."""
        assert isinstance(self.node, ast.ClassDef)
        found = {name: field for base in self.bases() for name, field in base._fields().items()}
        decorators = [word for each in self.node.decorator_list for word in getattr(each, "keywords", ())]
        is_by_name = "kw_only=True" in map(ast.unparse, [*self.node.keywords, *decorators])
        for statement in self.node.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            name, value = statement.target.id, "" if statement.value is None else ast.unparse(statement.value)
            if not ast.unparse(statement.annotation).startswith("ClassVar") and "init=False" not in value:
                is_required = not value or (value.startswith("field(") and "default" not in value)
                is_keyword = is_by_name or "kw_only=True" in value
                kind = Parameter.KEYWORD_ONLY if is_keyword else Parameter.POSITIONAL_OR_KEYWORD
                found[name] = _parameter(name, kind, is_required)
        return found

    def _decorators(self) -> set[str]:
        """Return the last words of a function's decorators."""
        listed = getattr(self.node, "decorator_list", ())
        calls = (each.func if isinstance(each, ast.Call) else each for each in listed)
        return {ast.unparse(each).rpartition(".")[2] for each in calls}


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
            found = None if found is None else found.members().get(member)
        return found


def parsed(text: str) -> ast.Module:
    """Return the syntax of a source file. Raises ``SyntaxError``."""
    return ast.parse(text)


class Module:
    """One source file."""

    def __init__(self, name: str, path: Path, sources: Sources) -> None:
        self.name, self._sources = name, sources
        self._package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        text = path.read_text(encoding="utf-8")
        self.tree, self.lines = parsed(text), text.splitlines()
        self.members: dict[ast.AST, dict[str, Definition]] = {}
        self._names: dict[str, ast.AST] = {}
        for each, statement in _defined(self.tree.body):
            # The last overload is the function itself. An import for type checkers is no definition.
            if each not in self._names or not isinstance(statement, ast.Import | ast.ImportFrom):
                self._names[each] = statement
        if isinstance(table := getattr(self._names.get(_ENVIRONMENT), "value", None), ast.Dict):
            named = zip(table.keys, table.values, strict=True)
            self._names.update((str(key.value), value) for key, value in named if isinstance(key, ast.Constant))

    def find(self, name: str, following: frozenset[str] = frozenset()) -> Definition | None:
        """Return the definition of a name of this module, in the module to which imports lead."""
        statement = self._names.get(name)
        if statement is None or self.name in following:
            submodule = self._sources.module(f"{self.name}.{name}")
            return None if submodule is None else Definition(submodule, submodule.tree)
        if not isinstance(statement, ast.ImportFrom):
            return Definition(self, statement)
        origin = resolve_name("." * statement.level + (statement.module or ""), self._package)
        if origin.partition(".")[0] != PACKAGE:
            return Definition(self, statement)
        original = next((alias.name for alias in statement.names if (alias.asname or alias.name) == name), name)
        module = self._sources.module(origin)
        return None if module is None else module.find(original, following | {self.name})


def _defined(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the names that statements define, those under conditions as well; of one for type checkers first."""
    for each in body:
        if isinstance(each, ast.If):
            yield from _defined([*each.body, *each.orelse])
        elif isinstance(each, ast.Try):
            handled = [statement for handler in each.handlers for statement in handler.body]
            yield from _defined([*handled, *each.body, *each.orelse, *each.finalbody])
        elif isinstance(each, ast.With):
            yield from _defined(each.body)
        elif isinstance(each, ast.ClassDef | Function):
            yield each.name, each
        elif isinstance(each, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], each) for alias in each.names)
        elif isinstance(each, ast.Assign | ast.AnnAssign):
            targets = each.targets if isinstance(each, ast.Assign) else [each.target]
            nodes = (node for target in targets for node in ast.walk(target))
            yield from ((node.id, each) for node in nodes if isinstance(node, ast.Name))


def _attributes_set(owner: ast.ClassDef | Function, holder: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield what a class or function sets on ``holder``, such as ``self``; buffers of a PyTorch module as well."""
    for node in ast.walk(owner):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            attributes = (each for each in ast.walk(node) if isinstance(each, ast.Attribute))
            stored = (each for each in attributes if isinstance(each.ctx, ast.Store))
            yield from ((each.attr, node) for each in stored if ast.unparse(each.value) == holder)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == f"{holder}.register_buffer":
            yield from ((str(name.value), node) for name in node.args[:1] if isinstance(name, ast.Constant))
