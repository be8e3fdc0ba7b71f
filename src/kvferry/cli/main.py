"""The command ``kvferry``. Imports a command's module for the command's help, and heavy libraries when it runs."""

import importlib
import sys
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import typer
from typer.core import TyperGroup

from kvferry.errors import KVFerryError, Reason, did_you_mean, install_command, vllm_remedy

ERROR_EXIT_CODE = 2
WITH_VLLM = ("torch", "transformers", "vllm")
"""Modules that only some commands need, as they need xxhash."""
ANY_ARGUMENTS = {"ignore_unknown_options": True, "allow_extra_args": True}


class Commands(TyperGroup):
    """``kvferry COMMAND``: each command is a function or a group in a module, imported on demand."""

    functions: ClassVar[dict[str, str]] = {
        "demo": "kvferry.cli.demo:demo",
        "plan": "kvferry.cli.plan:plan",
        "doctor": "kvferry.cli.doctor:doctor",
        "check": "kvferry.cli.check:check",
        "bench": "kvferry.cli.bench:bench",
        "settings": "kvferry.cli.settings:settings",
        "timeline": "kvferry.cli.timeline:timeline",
        "drain": "kvferry.cli.drain:drain",
        "ready": "kvferry.cli.drain:ready",
        "tiers": "kvferry.cli.tiers:tiers",
        "keys": "kvferry.cli.keys:keys",
    }

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the help."""
        return list(self.functions)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command's module and return the command. Raises ``UsageError`` for an unknown name."""
        if cmd_name not in self.functions:
            ctx.fail(f"No such command {cmd_name!r}. {did_you_mean(cmd_name, self.functions)}")
        module, function = self.functions[cmd_name].split(":")
        try:
            found = getattr(importlib.import_module(module), function)
        except ModuleNotFoundError as error:
            return _without_package(cmd_name, _missing_dependency(error))
        return typer.main.get_command(found) if isinstance(found, typer.Typer) else _single(cmd_name, found)


def _single(name: str, function: Callable[..., None], **options: Any) -> Any:
    """Return a command that is not in a group."""
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, **options)(function)
    return typer.main.get_command(single)


app = typer.Typer(
    name="kvferry", cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"kvferry {version('kvferry')}")
        raise typer.Exit


@app.callback()
def _kvferry(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Moves KV caches between vLLM engines, and between an engine and memory tiers.

    Try "kvferry doctor" first. "kvferry COMMAND --help" has examples.
    """


def main() -> None:
    """Run the command line; a :class:`KVFerryError`, or a package that is not installed, becomes one line on standard
    error and exit code 2.
    """
    try:
        app()
    except (KVFerryError, ModuleNotFoundError) as error:
        refusal = _missing_dependency(error) if isinstance(error, ModuleNotFoundError) else error
        print(f"kvferry: {refusal}", file=sys.stderr)
        sys.exit(ERROR_EXIT_CODE)


def _missing_dependency(error: ModuleNotFoundError) -> KVFerryError:
    """Return the error of a package that only some commands need; raise the error again for any other package."""
    package = (error.name or "").partition(".")[0]
    if package not in ("xxhash", *WITH_VLLM):
        raise error
    what = f"this command needs {package}, which is not installed."
    remedy = vllm_remedy() if package in WITH_VLLM else f"Install it: {install_command('xxhash')}"
    return KVFerryError(Reason.MISSING_DEPENDENCY, what, remedy)


def _without_package(name: str, error: KVFerryError) -> Any:
    """Return a command that raises the error, whatever its arguments: the list of commands needs no package."""

    def command() -> None:
        raise error

    return _single(name, command, help=f"Not available: {error}", context_settings=ANY_ARGUMENTS)


if __name__ == "__main__":
    main()
