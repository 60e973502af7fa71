"""Checks the command lines of the documentation: each program, command, option, target, module and file that they name exists.

A line is split as a shell splits it, without running anything. What is checked depends on the program (`CHECKS`); programs of
others, which a test cannot check, are listed with the reason (`OF_OTHERS`). Any other program is a mistake.
"""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from markdown_pages import ROOT
from packaging.requirements import InvalidRequirement, Requirement
from typer import Exit
from typer.main import get_command

from holdfast.agent.settings import AgentSettings
from holdfast.cli.main import application
from holdfast.diagnostics.settings import DiagnosticsSettings
from holdfast.replicator.settings import ReplicatorSettings
from holdfast.runtime.settings import ENV_PREFIX
from holdfast.supervisor.api.access import ROUTES
from holdfast.supervisor.settings import SupervisorSettings

Check = Callable[[list[str]], None]
OF_OTHERS = MappingProxyType(
    {
        "kubectl": "needs a cluster: tests/kubernetes drains nodes and reads the launcher's log",
        "gcloud": "needs a project of Google Cloud",
        "scontrol": "needs a running Slurm: tests/slurm drains and resumes nodes",
        "openssl": "prints a random token",
        "useradd": "would add a user to this machine",
        "redis-server": "a server of the reader's own",
        "redis-cli": "a client of the reader's own server",
        "./run_train.sh": "a script of torchtitan's repository",
        **dict.fromkeys(
            ("$EDITOR", "less", "tail", "cat", "grep", "mkdir", "patch", "hostname", "eval", "export", "."),
            "the reader's shell",
        ),
    }
)
_PUNCTUATION = "();|&<>"


class Wrong(Exception):
    """A command line names what does not exist."""


def commands(text: str) -> Iterator[str]:
    """The command lines of a block: continued lines are joined, substitutions `$(…)` follow as lines of their own."""
    for line in text.replace("\\\n", " ").splitlines():
        substituted = re.findall(r"\$\(([^()]*)\)", line)
        yield from (line, *substituted)


def check_line(line: str) -> None:
    """Raises `Wrong` with what does not exist."""
    for words in _simple_commands(line):
        named = list(takewhile(_assignment, words))
        for variable in named:
            check_variable(variable.partition("=")[0])
        rest = words[len(named) :]
        if rest and rest[0] not in OF_OTHERS:
            if rest[0] not in CHECKS:
                raise Wrong(f"{rest[0]} is neither checked here nor listed as a program of others")
            CHECKS[rest[0]](rest[1:])


def check_span(text: str) -> None:
    """The same for a command in the text, which may be shortened: `holdfast jobs list|show JOB …`. Raises `Wrong`."""
    words = shlex.split(re.sub(r"…|\[-- .*\]|[\[\]]", " ", text))
    match words:
        case ["holdfast", *rest]:
            _check_shortened(rest)
        case ["python", "-m"] | ["python", "train.py"]:
            pass
        case [program, *rest]:
            CHECKS[program](rest)


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Each command of a line with `|`, `&&`, `;` and redirections, as its words."""
    lexer = shlex.shlex(re.sub(r"\$\([^()]*\)", "SUBSTITUTED", line), posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    redirected = False
    for word in takewhile(lambda word: not word.startswith("#"), lexer):
        if set(word) <= set(_PUNCTUATION):
            redirected = word[0] in "<>"
            if not redirected:
                yield words
                words = []
        elif redirected:
            redirected = False
        else:
            words.append(word)
    yield words


def _assignment(word: str) -> bool:
    return re.match(r"[A-Z_][A-Z0-9_]*=", word) is not None


def check_variable(name: str) -> None:
    """Raises `Wrong` for a variable of Holdfast that nothing reads."""
    if name.startswith(ENV_PREFIX) and name not in settings():
        raise Wrong(f"no service or command reads {name}")


@cache
def settings() -> frozenset[str]:
    """The variables that the services read, and those that other code and docker-compose.yml name."""
    kinds = (AgentSettings, DiagnosticsSettings, ReplicatorSettings, SupervisorSettings)
    fields = {f"{ENV_PREFIX}{field.upper()}" for kind in kinds for field in kind.model_fields}
    sources = [each for root in ("src", "tools", "services") for each in (ROOT / root).rglob("*.py")]
    texts = [each.read_text() for each in (*sources, ROOT / "docker-compose.yml")]
    return frozenset(fields | {name for text in texts for name in re.findall(r"HOLDFAST_[A-Z0-9_]+", text)})


# ---------------------------------------------------------------- holdfast


@cache
def _application() -> Any:
    return get_command(application())


def _check_holdfast(arguments: Sequence[str]) -> None:
    """By the command's own parser, up to the point where it would do something."""
    command = _application()
    try:
        context = command.make_context("holdfast", list(arguments))
        while hasattr(command, "commands") and (following := [*context._protected_args, *context.args]):
            name, command, rest = command.resolve_command(context, following)
            context = command.make_context(name, rest, parent=context)
    except Exit:  # an option such as --help, which is done here
        return
    except Exception as error:
        if not hasattr(error, "format_message"):  # an error of the parser, whose class depends on the version of Typer
            raise
        raise Wrong(f"holdfast {shlex.join(arguments)}: {error.format_message()}") from error
    if hasattr(command, "commands") and not command.invoke_without_command:
        raise Wrong(f"holdfast {shlex.join(arguments)}: the command is missing")
    if context.args:
        raise Wrong(f"holdfast {shlex.join(arguments)}: left over: {context.args}")


def _check_shortened(words: Sequence[str]) -> None:
    """Commands and options exist; arguments may be missing, and names may be alternatives: `list|show`."""
    found: list[Any] = [_application()]
    is_value = False
    for word in takewhile(lambda word: word != "--", words):
        if word.startswith("-"):
            options = {name: option for command in found for name, option in _options(command).items()}
            if word not in options:
                raise Wrong(f"holdfast {' '.join(words)} has no option {word}")
            is_value = not getattr(options[word], "is_flag", True)
        elif is_value:
            is_value = False
        elif all(hasattr(command, "commands") for command in found):
            names = word.split("|")
            for command in found:
                if missing := [name for name in names if name not in command.commands]:
                    raise Wrong(f"holdfast {' '.join(words)}: there is no command {missing[0]}")
            found = [command.commands[name] for command in found for name in names]


def _options(command: Any) -> dict[str, Any]:
    own = {option: each for each in command.params for option in (*each.opts, *each.secondary_opts)}
    return own | dict.fromkeys(("--help", "-h", "--install-completion"))


# ---------------------------------------------------------------- other programs


def _check_make(arguments: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipes = ""
    for word in arguments:
        if _assignment(word):
            name, _, value = word.partition("=")
            if not re.search(rf"^{name} \?=", makefile, re.M):
                raise Wrong(f"make: the Makefile does not ask for {name}")
            if name == "ARGS":
                _check_passed_on(recipes, shlex.split(value))
        elif found := re.search(rf"^{re.escape(word)}:.*\n((?:\t.*\n|@.*\n)*)", makefile, re.M):
            recipes += found[1]
        else:
            raise Wrong(f"make: there is no target {word}")


def _check_passed_on(recipes: str, arguments: list[str]) -> None:
    """The options in ARGS are those of what the target runs: a benchmark's module, or the command itself."""
    if module := re.search(r"-m benchmarks\.(\w+)", recipes):
        path = ROOT / "benchmarks" / module[1]
        text = (
            path.with_suffix(".py").read_text()
            if path.with_suffix(".py").exists()
            else (path / "__main__.py").read_text()
        )
        if unknown := [word for word in arguments if word.startswith("-") and f'"{word}"' not in text]:
            raise Wrong(f"benchmarks.{module[1]} has no option {unknown[0]}")
    elif command := re.search(r"/holdfast (\w+)", recipes):
        _check_holdfast([command[1], *arguments])
    else:
        raise Wrong(f"make: no test knows what becomes of ARGS {arguments}")


def _check_python(arguments: list[str]) -> None:
    match arguments:
        case ["-m", "venv", _]:
            pass
        case ["-m", module, *_] if module.split(".")[0] in ("holdfast", "benchmarks"):
            if find_spec(module) is None:
                raise Wrong(f"python: there is no module {module}")
        case [script, *_] if (ROOT / script).is_file():
            pass
        case _:
            raise Wrong(f"python {shlex.join(arguments)}: no such module or file")


def _check_pip(arguments: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if arguments[:1] != ["install"]:
        raise Wrong(f"pip {shlex.join(arguments)}: only install is checked")
    for word in arguments[1:]:
        path, _, extras = word.partition("[")
        if path in (".", "CHECKOUT"):
            wanted = {each.strip() for each in extras.rstrip("]").split(",") if each}
        elif "/" in path:
            if not (ROOT / path / "pyproject.toml").is_file():
                raise Wrong(f"pip: {path} is not a project")
            continue
        else:
            try:
                requirement = Requirement(word)
            except InvalidRequirement as error:
                raise Wrong(f"pip: {word}: {error}") from error
            if requirement.name != project["name"]:
                raise Wrong(f"pip: {requirement.name} is not {project['name']}")
            wanted = requirement.extras
        if missing := wanted - project["optional-dependencies"].keys():
            raise Wrong(f"pip: there are no extras {', '.join(sorted(missing))}")


def _check_torchrun(arguments: list[str]) -> None:
    scripts = [word for word in arguments if word.endswith(".py")]
    if not scripts or not (ROOT / scripts[0]).is_file():
        raise Wrong(f"torchrun {shlex.join(arguments)}: no such script")


def _check_docker(arguments: list[str]) -> None:
    match arguments:
        case ["build", "-f", dockerfile, "--target", stage, *_]:
            if not re.search(rf"^FROM .* AS {stage}$", (ROOT / dockerfile).read_text(), re.M | re.I):
                raise Wrong(f"docker: {dockerfile} has no stage {stage}")
        case ["push", _] | ["compose", "up" | "down", *_]:
            for service in re.findall(r"--scale (\S+)=", shlex.join(arguments)):
                _check_service(service)
        case ["compose", "kill" | "start", service]:
            _check_service(service)
        case ["compose", "run", "--rm", "--no-deps", service, "cat", file]:
            _check_service(service)
            if not any(volume.split(":")[1] == str(Path(file).parent) for volume in _services()[service]["volumes"]):
                raise Wrong(f"docker compose: {service} has no volume with {file}")
        case ["compose", "exec", service, "holdfast", *rest]:
            _check_service(service)
            _check_holdfast(rest)
        case _:
            raise Wrong(f"docker {shlex.join(arguments)}: no test knows this command")


def _services() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return services


def _check_service(name: str) -> None:
    if name not in _services():
        raise Wrong(f"docker compose: there is no service {name}")


def _check_helm(arguments: list[str]) -> None:
    match arguments:
        case ["install" | "upgrade", _, chart, *rest]:
            values = yaml.safe_load((ROOT / chart / "values.yaml").read_text())
            for given in (word for word in rest if "=" in word):
                part: Any = values
                for key in given.partition("=")[0].split("."):
                    if not isinstance(part, dict) or key not in part:
                        raise Wrong(f"helm: the chart has no value {given.partition('=')[0]}")
                    part = part[key]
        case _:
            raise Wrong(f"helm {shlex.join(arguments)}: no test knows this command")


def _check_curl(arguments: list[str]) -> None:
    (url,) = (word for word in arguments if "/v1/" in word)
    path = re.sub(r"^[^/]*(//[^/]*)?|\?.*$", "", url)
    shapes = [re.sub(r"\{[^}]*\}", "[^/]+", route.partition(" ")[2]) for route in ROUTES if route.startswith("GET ")]
    if not any(re.fullmatch(shape, path) for shape in shapes):
        raise Wrong(f"curl: the API has no {path}")


CHECKS: dict[str, Check] = {
    "holdfast": _check_holdfast,
    "make": _check_make,
    "python": _check_python,
    "pip": _check_pip,
    "torchrun": _check_torchrun,
    "docker": _check_docker,
    "helm": _check_helm,
    "curl": _check_curl,
}
