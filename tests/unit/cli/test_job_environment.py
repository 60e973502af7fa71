"""The environment of a job: what overrides what, what is passed on, and what is printed: names, never values."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.job_environment import Given, Passed, looks_secret, read_file, report
from holdfast.domain.errors import InvalidSpec
from holdfast.domain.job import EnvSource, LaunchSpec

SHELL = {
    "HOME": "/root",
    "WANDB_PROJECT": "llm",
    "WANDB_API_KEY": "k-1",
    "HF_HOME": "/cache",
    "HF_TOKEN": "h-1",
    "MLFLOW_TRACKING_URI": "https://me:pw@tracker",
    "NCCL_DEBUG": "INFO",
    "OMP_NUM_THREADS": "4",
    "RANK": "3",
    "TORCHELASTIC_RUN_ID": "x",
}


def test_the_command_line_overrides_files_and_the_job_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a.env", tmp_path / "b.env"
    first.write_text("# tracking\n\nexport A=1\nB='two words'\nC=\"x=y\"\n")
    second.write_text("B=3\nD = 4 # not a comment\n")
    given = Given.of(["C=5", "HOME", "E="], [first, second], ["S=file:~/key"], SHELL)
    assert given.values == {"A": "1", "B": "3", "C": "5", "D": "4 # not a comment", "HOME": "/root", "E": ""}
    launch = LaunchSpec("/x.py", env=(("A", "0"), ("S", "plain"), ("Z", "9")), env_from=(EnvSource("C", file="/c"),))
    applied = given.applied(launch, {"Z": "8", "Y": "7"})
    assert dict(applied.env) == {"Z": "9", "Y": "7", **given.values}
    assert applied.env_from == (EnvSource("S", file="~/key"),)


@pytest.mark.parametrize(
    ("env", "env_from", "said"),
    [
        (["=x"], [], "--env: ''"),
        (["MISSING"], [], "--env: 'MISSING' .* this shell has no such variable"),
        (["A=1"], ["A=file:/x"], "--env-from: 'A'"),
        ([], ["A=/x"], "--env-from: 'A' .* NAME=file:PATH or NAME=command"),
        ([], ["A=file:"], "--env-from"),
    ],
)
def test_what_makes_no_sense_names_the_option(env: list[str], env_from: list[str], said: str) -> None:
    with pytest.raises(InvalidSpec, match=said):
        Given.of(env, [], env_from, SHELL)


def test_a_broken_file_names_the_line_and_shows_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "env"
    path.write_text("A=1\nno equals sign here\n")
    with pytest.raises(InvalidSpec, match=f"line 2 of {path}") as error:
        read_file(path)
    assert "equals" not in str(error.value)
    with pytest.raises(InvalidSpec, match="a readable file"):
        read_file(tmp_path / "missing")


def test_what_a_job_elsewhere_gets_of_this_shell() -> None:
    passed = Passed.of(SHELL, besides=["HF_HOME"])
    assert dict(passed.values) == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "WANDB_PROJECT": "llm"}
    assert passed.secrets == ("HF_TOKEN", "MLFLOW_TRACKING_URI", "WANDB_API_KEY")


def test_names_are_printed_and_values_are_not() -> None:
    launch = LaunchSpec(
        "/x.py", env=(("MODE", "fast"), ("DB_PASSWORD", "p-1")), env_from=(EnvSource("KEY", file="/k"),)
    )
    for local in (True, False):
        text = "\n".join(report(launch, Passed.of(SHELL), local=local))
        assert "environment of the job: MODE, DB_PASSWORD, KEY" in text
        assert "the API shows the value of DB_PASSWORD" in text
        assert not any(value in text for value in ("fast", "p-1", "k-1", "h-1", "llm", "me:pw"))
    assert "not passed on, because 3 values may be secret" in text
    assert "HF_TOKEN" in report(LaunchSpec("/x.py"), Passed.of(SHELL), local=True)[0]


@pytest.mark.parametrize("name", ["API_KEY", "HF_TOKEN", "AWS_SECRET", "token", "DB_PASSWORD"])
def test_names_of_secrets(name: str) -> None:
    assert looks_secret(name, "x")


@pytest.mark.parametrize("name", ["HF_TOKEN_PATH", "KEYS", "TOKENIZERS_PARALLELISM", "MONKEY"])
def test_names_of_none(name: str) -> None:
    assert not looks_secret(name, "https://host:80/a")
