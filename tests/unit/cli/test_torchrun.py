"""torchrun's flags as a job: what is taken, in every spelling, and what is refused by name."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from holdfast.cli import run as run_module
from holdfast.cli import torchrun
from holdfast.cli.log_tail import ALL_RANKS
from holdfast.cli.main import application
from holdfast.domain.errors import HoldfastError, InvalidSpec
from holdfast.domain.job import JobSpec
from holdfast.domain.mesh import Mesh

Run = tuple[JobSpec, dict[str, Any]]


class Recorder:
    """Stands where the job would be run."""

    def __init__(self) -> None:
        self.spec: JobSpec | None = None
        self.ranks: Any = None
        self.spares = 0

    def __call__(self, spec: JobSpec, url: str, own: Any, detach: bool, ranks: Any, start: Any) -> int:
        self.spec, self.ranks, self.spares = spec, ranks, own.spares
        return 0


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(run_module, "_run", recorder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOLDFAST_API", raising=False)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "policy.py").write_text("def decide(incident, job): ...\n")
    return recorder


def typed(*arguments: str) -> None:
    """As typed after `holdfast run`. Raises what the command raises."""
    result = CliRunner().invoke(application("run"), ["run", "--local", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output


def spec_of(recorder: Recorder, *arguments: str) -> JobSpec:
    typed(*arguments)
    assert recorder.spec is not None
    return recorder.spec


@pytest.mark.parametrize(
    "flags",
    [
        ["--nnodes", "2", "--nproc-per-node", "4"],
        ["--nnodes=2", "--nproc_per_node=4"],
        ["--nnodes=2", "--nproc-per-node=4", "--rdzv-backend=c10d", "--rdzv_endpoint", "host:29400", "--rdzv_id=7"],
        ["--nnodes=2", "--nproc_per_node=4", "--master_addr", "host", "--master-port=29500", "--node_rank", "1"],
        ["--standalone", "--nnodes=2", "--nproc-per-node=4", "--log_dir", "logs", "-r", "3", "--monitor-interval", "1"],
    ],
)
def test_torchrun_flags_in_either_spelling(recorder: Recorder, flags: list[str]) -> None:
    spec = spec_of(recorder, *flags, "train.py")
    assert (spec.nodes, spec.nproc_per_node, dict(spec.mesh.dims)) == (2, 4, {"dp": 8})
    assert spec.launch.cwd == os.getcwd()


def test_every_flag_of_torchrun_is_taken_or_refused_by_name(recorder: Recorder) -> None:
    """None may fall through to 'No such option'."""
    distributed_run = pytest.importorskip("torch.distributed.run")
    refused = set()
    for action in distributed_run.get_args_parser()._actions:
        for flag in set(action.option_strings) - {"-h", "--help"}:
            value = [] if action.nargs == 0 else ["1"]
            with contextlib.suppress(InvalidSpec):
                typed("--nproc-per-node=2", flag, *value, "train.py")
                continue
            refused.add(torchrun.spelling(flag))
    assert refused == {"--virtual-local-rank", "--numa-binding", "--signals-to-handle"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--nnodes", "7", "--name", "other"],
        ["--help"],
        ["--", "--lr_x", "3e-4"],
        ["-m", "x", "--detach"],
        ["--lr=3e-4", "positional", "--flag_with_underscores", ""],
        ["job.yaml", "ünï cöde", "--a=b c", "$HOME"],
    ],
)
def test_the_scripts_arguments_pass_untouched(recorder: Recorder, arguments: list[str]) -> None:
    spec = spec_of(recorder, "--nnodes=1", "train.py", *arguments)
    assert spec.launch.args == tuple(arguments)
    assert spec.name == "train"


@pytest.mark.parametrize(
    ("flags", "target", "key", "name"),
    [
        (["-m"], "pkg.train_llm", "module", "train-llm"),
        (["--module"], "pkg.__main__", "module", "pkg"),
        (["--no-python"], "llamafactory-cli", "command", "llamafactory-cli"),
        (["--run-path"], "train.py", "script", "train"),
    ],
)
def test_what_is_started(recorder: Recorder, flags: list[str], target: str, key: str, name: str) -> None:
    spec = spec_of(recorder, *flags, target, "train", "-m", "--lr=1")
    assert Path(getattr(spec.launch, key)).name == target
    assert (spec.launch.target, spec.name) == (getattr(spec.launch, key), name)
    assert spec.launch.args == ("train", "-m", "--lr=1")
    assert spec.launch.cwd == os.getcwd()


def test_modules_and_variables(recorder: Recorder) -> None:
    spec = spec_of(
        recorder, "--preload", "a.b, c", "--preload=d", "--env", "MODE=fast", "--env-from", "K=file:k", "train.py"
    )
    assert spec.launch.preload == ("auto", "a.b", "c", "d")
    assert spec.launch.env == (("MODE", "fast"),)
    assert spec.launch.env_from[0].file == "k"


@pytest.mark.parametrize(
    ("flags", "preload"),
    [
        ((), ("auto",)),
        (("--preload", "none"), ()),
        (("--preload", "none,a.b"), ("a.b",)),
        (("--preload", "auto,a.b"), ("auto", "a.b")),
    ],
)
def test_modules_are_learned_unless_that_is_turned_off(
    recorder: Recorder, flags: tuple[str, ...], preload: tuple[str, ...]
) -> None:
    assert spec_of(recorder, *flags, "train.py").launch.preload == preload


def test_a_range_of_nodes_is_a_range_of_replicas(recorder: Recorder) -> None:
    spec = spec_of(recorder, "--nnodes", "2:4", "--nproc-per-node", "3", "train.py")
    assert (spec.nodes, spec.min_dp, spec.max_dp, spec.mesh.dp) == (4, 6, 12, 12)


def test_the_rest_of_the_job(recorder: Recorder) -> None:
    spec = spec_of(
        recorder, "--name", "mine", "--max-restarts", "5", "--policy", "policy.py", "--spares", "2", "train.py"
    )
    assert spec.name == "mine"
    assert spec.limits.restarts_without_progress_max == 5
    assert spec.policy == str(Path("policy.py").resolve())
    assert (spec.spares, recorder.spares) == (2, 2)


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train.py", "train"),
        ("my_Train.v2.py", "my-train-v2"),
        ("__main__.py", "main"),
        ("Üben.py", "ben"),
        ("_.py", "job"),
        ("a" * 80 + ".py", "a" * 63),
    ],
)
def test_a_name_is_made_of_the_scripts(script: str, name: str) -> None:
    assert torchrun.job_name(script) == name


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ([], {0}),
        (["--show-ranks", "1,3"], {1, 3}),
        (["--local-ranks-filter", "2"], {2}),
        (["--local_ranks_filter=2"], {2}),
        (["--show-ranks", "all"], ALL_RANKS),
        (["--tee", "3"], ALL_RANKS),
        (["-t", "1"], ALL_RANKS),
        (["--tee", "0"], set()),
        (["--tee", "0:3,2:1,3:0"], {0, 2}),
        (["--tee", "3", "--show-ranks", "1"], {1}),
    ],
)
def test_whose_output_is_shown(recorder: Recorder, flags: list[str], ranks: set[int] | None) -> None:
    spec_of(recorder, "--nproc-per-node=4", *flags, "train.py")
    assert recorder.ranks == ranks


@pytest.mark.parametrize(
    ("mesh", "ranks"),
    [
        ({"dp": 4}, {0}),
        ({"pp": 1, "dp": 4}, {0}),
        ({"dp": 2, "pp": 4}, {0, 3}),
        ({"pp": 4, "dp": 2, "tp": 2}, {0, 12}),
    ],
)
def test_with_pipeline_stages_the_output_of_the_last_is_shown_too(mesh: dict[str, int], ranks: set[int]) -> None:
    assert torchrun.shown_ranks("", "", Mesh.of(mesh)) == frozenset(ranks)
    assert torchrun.shown_ranks("1", "", Mesh.of(mesh)) == frozenset({1})
    assert torchrun.shown_ranks("", "3", Mesh.of(mesh)) == ALL_RANKS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nnodes", "x", "train.py"], r"--nnodes: 'x' is not valid; expected a number or MIN:MAX"),
        (["--nnodes", "0", "train.py"], r"--nnodes: '0' .* at least 1"),
        (["--nnodes", "4:2", "train.py"], r"--nnodes: '4:2' .*MIN ≤ MAX"),
        (["--nnodes", "1:", "train.py"], r"--nnodes: '1:' "),
        (["--nnodes", "²", "train.py"], r"--nnodes: '²' "),
        (["--nproc-per-node", "0", "train.py"], r"--nproc-per-node: '0' .*at least 1, gpu, cpu or auto"),
        (["--nproc-per-node", "²", "train.py"], r"--nproc-per-node: '²' "),
        (["--nproc_per_node=-2", "train.py"], r"--nproc-per-node: '-2' "),
        (["--show-ranks", "x", "train.py"], r"--show-ranks: 'x' .*all, or ranks separated by commas"),
        (["--show-ranks", "1", "train.py"], r"--show-ranks: 1 .*0 to 0"),
        (["--tee", "9", "train.py"], r"--tee: '9' .*0 to 3.*--show-ranks"),
        (["-m", "--no-python", "pkg.train"], r"--no-python: '--module' .*only one of"),
        (["-m", "pkg/train.py"], r"module: 'pkg/train\.py' .*a module's dotted name"),
        (["--no-python", "./missing"], r"command: '\./missing' .*an existing file"),
        (["--preload", "a b", "train.py"], r"preload\[0\]: 'a b' .*a module's dotted name"),
        (["--env", "=1", "train.py"], r"--env: "),
        (["missing.py"], r"script: 'missing\.py' .*an existing file; .*/missing\.py is not one"),
        (["--policy", "missing.py", "train.py"], r"policy: 'missing\.py' .*an existing file"),
        (["--name", "Not Valid", "train.py"], r"name: 'Not Valid' .*lower-case letters"),
        (["--api", "http://127.0.0.1:1", "train.py"], r"--api: .*either --api or --local"),
        (["--detach", "train.py"], r"--detach cannot be used with --local"),
    ],
)
def test_what_cannot_be_run_is_named(recorder: Recorder, arguments: list[str], message: str) -> None:
    with pytest.raises(HoldfastError, match=message):
        typed(*arguments)
    assert recorder.spec is None


def test_no_gpu_to_count(recorder: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torchrun, "GPUS", tmp_path / "none")
    with pytest.raises(InvalidSpec, match="this machine has no GPU"):
        typed("--nproc-per-node", "gpu", "train.py")
    assert spec_of(recorder, "--nproc-per-node", "auto", "train.py").nproc_per_node == os.cpu_count()
    for number in range(3):
        (tmp_path / "none" / f"0000:0{number}:00.0").mkdir(parents=True)
    assert spec_of(recorder, "--nproc-per-node", "gpu", "train.py").nproc_per_node == 3


JOB = "name: llm\nscript: train.py\nnodes: 2\nspares: 1\n"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nnodes", "2"], r"--nnodes: '2' .*no --nnodes with a job file; set nodes"),
        (["--nproc_per_node=1"], r"--nproc-per-node: .*nproc_per_node"),
        (["--name", "x"], r"--name: 'x' .*set name: in the file"),
        (["--max-restarts", "1"], r"--max-restarts: 1 "),
        (["--policy", "policy.py"], r"--policy: "),
        (["--preload", "a"], r"--preload: .*set preload: in the file"),
    ],
)
def test_a_flag_beside_a_job_file_is_not_dropped_in_silence(recorder: Recorder, flags: list[str], message: str) -> None:
    Path("job.yaml").write_text(JOB)
    with pytest.raises(InvalidSpec, match=message):
        typed(*flags, "job.yaml")
    assert recorder.spec is None


def test_nothing_comes_after_a_job_file(recorder: Recorder) -> None:
    Path("job.yaml").write_text(JOB)
    with pytest.raises(InvalidSpec, match=r"arguments: '--detach' .*put options before it"):
        typed("job.yaml", "--detach")


def test_a_job_file_says_how_many_spares_unless_the_user_does(recorder: Recorder) -> None:
    Path("job.yaml").write_text(JOB)
    typed("job.yaml")
    assert recorder.spares == 1
    typed("--spares", "0", "job.yaml")
    assert recorder.spares == 0
