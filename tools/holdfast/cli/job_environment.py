"""The environment that `holdfast run` gives a job: `--env`, `--env-file`, `--env-from`, and variables of this shell.

A local stack passes the complete environment of this shell on to its workers, as torchrun does. A job that is submitted to a
running Holdfast as a script with torchrun's options gets the variables of `PASSED_PREFIXES`. They are stored with the job and
shown by the API, so variables that look like secrets are never passed. The names of the passed variables are printed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.evolve import evolve
from holdfast.domain.job import EnvSource, LaunchSpec
from holdfast.domain.words import plural

Env = Annotated[
    list[str] | None,
    typer.Option(
        "--env",
        help="Environment variable of the workers, NAME=VALUE, or NAME with its value in this shell. Repeatable.",
        show_default=False,
    ),
]
EnvFile = Annotated[
    list[Path] | None,
    typer.Option("--env-file", help="File with lines NAME=VALUE for the workers. Repeatable.", show_default=False),
]
EnvFrom = Annotated[
    list[str] | None,
    typer.Option(
        "--env-from",
        help="A secret for the workers, NAME=file:PATH or NAME=command:COMMAND LINE. Each node reads it when it starts "
        "workers; the value is neither stored nor shown. Repeatable.",
        show_default=False,
    ),
]

# Variables that training scripts and their libraries read, and that no launcher or node sets.
PASSED_PREFIXES = (
    *("WANDB_", "MLFLOW_", "COMET_", "NEPTUNE_", "CLEARML_", "TENSORBOARD_"),  # trackers
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "TOKENIZERS_", "DIFFUSERS_", "ACCELERATE_", "FSDP_", "DEEPSPEED_", "DS_"),
    *("MEGATRON_", "NEMO_", "NVTE_", "TRITON_", "TORCH_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "PYTORCH_"),
    *("NCCL_", "GLOO_", "UCX_", "FI_", "CUBLAS_", "CUDNN_"),
)
PASSED_NAMES = frozenset(
    {
        *("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "OMP_NUM_THREADS", "MKL_NUM_THREADS"),
        *("PYTHONHASHSEED", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "PYTHONWARNINGS"),
    }
)
# Signs of a secret: the last word of the variable's name, or a password in a URL.
_SECRET_WORDS = frozenset(
    {*("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "COOKIE")}
)
_PASSWORD_IN_URL = re.compile(r"://[^/\s@]*:[^/\s@]*@")

FILE_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class Given:
    """The environment from the options of the command line."""

    values: Mapping[str, str]
    sources: tuple[EnvSource, ...]

    @classmethod
    def of(cls, env: Iterable[str], files: Iterable[Path], env_from: Iterable[str], shell: Mapping[str, str]) -> Given:
        """`--env` overrides files, later files earlier ones. Raises `InvalidSpec` that names the option."""
        values: dict[str, str] = {}
        for path in files:
            values |= read_file(path)
        values |= dict(_variable(text, shell) for text in env)
        sources = tuple(map(_source, env_from))
        names = {source.name for source in sources}
        if twice := sorted(names & values.keys()):
            raise InvalidSpec("--env-from", twice[0], "a variable that --env and --env-file do not set")
        return cls(values, sources)

    def applied(self, launch: LaunchSpec, more: Mapping[str, str] | None = None) -> LaunchSpec:
        """Return the launch with these variables, which override its own. Variables of `more` do not override."""
        sources = {source.name: source for source in (*launch.env_from, *self.sources)}
        env = {**(more or {}), **dict(launch.env), **self.values}
        sources = {name: source for name, source in sources.items() if name not in self.values}
        kept = {name: value for name, value in env.items() if name not in sources}
        return evolve(launch, env=tuple(kept.items()), env_from=tuple(sources.values()))


@dataclass(frozen=True, slots=True)
class Passed:
    """Variables of this shell for a job that runs elsewhere, and the names of those that look like secrets."""

    values: Mapping[str, str]
    secrets: tuple[str, ...]

    @classmethod
    def of(cls, shell: Mapping[str, str], besides: Iterable[str] = ()) -> Passed:
        """Select variables of the shell. `besides`: names that the job sets itself."""
        wanted = {name: shell[name] for name in sorted(shell) if _is_passed(name) and name not in set(besides)}
        secrets = tuple(name for name, value in wanted.items() if looks_secret(name, value))
        return cls({name: value for name, value in wanted.items() if name not in secrets}, secrets)


def report(launch: LaunchSpec, passed: Passed, *, local: bool) -> list[str]:
    """Return lines for the user, with names, never with values."""
    lines = []
    own = [*(name for name, _ in launch.env if name not in passed.values), *(source.name for source in launch.env_from)]
    if own:
        lines.append(f"environment of the job: {', '.join(own)}")
    names = [*passed.values, *passed.secrets] if local else [*passed.values]
    if names:
        lines.append(
            f"passed on with the rest of this shell's environment, as by torchrun: {', '.join(sorted(names))}"
            if local
            else f"passed on from this shell: {', '.join(names)}"
        )
    if passed.secrets and not local:
        lines.append(
            f"not passed on, because {plural(len(passed.secrets), 'value')} may be secret and a job's environment is stored "
            f"and shown: {', '.join(passed.secrets)}. Use --env-from NAME=file:PATH, or env_from in a job file"
        )
    if shown := sorted(name for name, value in launch.env if looks_secret(name, value)):
        lines.append(
            f"the API shows the value of {', '.join(shown)}, because it is stored with the job; --env-from NAME=file:PATH is "
            "neither stored nor shown"
        )
    return lines


def looks_secret(name: str, value: str) -> bool:
    return name.rpartition("_")[2].upper() in _SECRET_WORDS or _PASSWORD_IN_URL.search(value) is not None


def read_file(path: Path) -> dict[str, str]:
    """Read lines NAME=VALUE. Empty lines and lines that begin with # are ignored; `export` before a name and quotes around the
    value are removed. Nothing is expanded. Raises `InvalidSpec` with the line's number."""
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        text = raw.decode()
    except OSError as error:
        raise InvalidSpec("--env-file", str(path), f"a readable file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidSpec("--env-file", str(path), "a text file in UTF-8") from error
    if len(raw) > FILE_BYTES_MAX:
        raise InvalidSpec("--env-file", str(path), f"a file of at most {FILE_BYTES_MAX} bytes")
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name, equals, value = stripped.removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _is_name(name):  # the line may contain a secret, so it is not shown
            raise InvalidSpec("--env-file", f"line {number} of {path}", "NAME=VALUE")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1]
        values[name] = value
    return values


def _variable(text: str, shell: Mapping[str, str]) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not _is_name(name):
        raise InvalidSpec("--env", name, "NAME=VALUE, or the NAME of a variable of this shell")
    if equals:
        return name, value
    if name not in shell:
        raise InvalidSpec("--env", name, "NAME=VALUE, because this shell has no such variable")
    return name, shell[name]


def _source(text: str) -> EnvSource:
    name, _, reference = text.partition("=")
    kind, _, where = reference.partition(":")
    if not _is_name(name) or kind not in ("file", "command") or not where.strip():
        raise InvalidSpec(
            "--env-from", text if kind in ("file", "command") else name, "NAME=file:PATH or NAME=command:…"
        )
    return EnvSource(name, file=where) if kind == "file" else EnvSource(name, command=where)


def _is_name(text: str) -> bool:
    return bool(text) and "\0" not in text and not any(character.isspace() for character in text)


def _is_passed(name: str) -> bool:
    return name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)
