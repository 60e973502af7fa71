"""Job files: what is right becomes a spec, what is wrong is named with its line, all of it at once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from values import jobs

from holdfast.domain.errors import InvalidSpec, InvalidSpecs
from holdfast.domain.job import CheckpointSpec, EnvSource, JobSpec, PolicySpec, ReportSpec, ResumeSpec
from holdfast.domain.mesh import Mesh
from holdfast.wire.job_sections import JobFile, schema
from holdfast.wire.jobfile import load_job, parse_job, parse_policy, to_body, to_request


@pytest.fixture
def write(tmp_path: Path) -> Any:
    (tmp_path / "train.py").touch()

    def write_file(text: str) -> Path:
        path = tmp_path / "job.yaml"
        path.write_text(text)
        return path

    return write_file


def problems(path: Path) -> list[str]:
    with pytest.raises(InvalidSpec) as caught:
        load_job(path)
    return str(caught.value).replace(f"{path}:", "").splitlines()


def test_the_least_that_is_a_job(write: Any, tmp_path: Path) -> None:
    spec = load_job(write("name: gpt\nscript: train.py\nnodes: 2\nnproc_per_node: 4\n"))
    assert spec.launch.script == str(tmp_path / "train.py")
    assert (spec.mesh, spec.min_dp, spec.max_dp) == (Mesh.of({"dp": 8}), 8, 8)


def test_everything_that_a_job_can_say(write: Any, tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_text("def decide(i, j): ...\n")
    spec = load_job(
        write(
            """\
name: gpt
script: train.py
args: [--steps, 100, --lr, 3e-4, --ratio, 0.5]
cwd: .
env: {OMP_NUM_THREADS: 1, MODE: fast}
preload: [numpy, "json.decoder:prepare"]
nodes: 9
mesh: {dp: 3, pp: 3}
elastic: {min_dp: 2}
checkpoint: {interval_steps: 20, keep: 3}
hang: {floor_s: 5, factor: 4, init_s: 60}
limits: {prepare_timeout_s: 10, first_step_timeout_s: 20, restarts_without_progress_max: 0, suspect_test_s: 0.5}
checks: {replica_every_steps: 100}
policy: policy.py
spares: 1
"""
        )
    )
    assert spec.launch.args == ("--steps", "100", "--lr", "3e-4", "--ratio", "0.5")
    assert spec.launch.env == (("OMP_NUM_THREADS", "1"), ("MODE", "fast"))
    assert spec.launch.cwd == str(tmp_path)
    assert (spec.min_dp, spec.max_dp, spec.mesh.dims) == (2, 3, (("dp", 3), ("pp", 3)))
    assert spec.limits.suspect_test_s == 0.5
    assert (spec.checkpoint.interval_steps, spec.hang.floor_s, spec.limits.restarts_without_progress_max) == (
        20,
        5.0,
        0,
    )
    assert spec.policy_spec == PolicySpec(str(tmp_path / "policy.py"), "def decide(i, j): ...\n")
    assert spec.checks.replica_every_steps == 100


def test_a_module_or_a_program_instead_of_a_script(write: Any, tmp_path: Path) -> None:
    module = load_job(
        write("name: gpt\nmodule: pkg.train\nenv_from: {KEY: {file: key}, TOKEN: {command: vault read x}}\n")
    )
    assert (module.launch.module, module.launch.script, module.launch.cwd) == ("pkg.train", "", str(tmp_path))
    assert module.launch.env_from == (
        EnvSource("KEY", file=str(tmp_path / "key")),
        EnvSource("TOKEN", command="vault read x"),
    )
    program = load_job(write("name: gpt\ncommand: trl\nargs: [sft]\n"))
    assert (program.launch.command, program.launch.cwd) == ("trl", str(tmp_path))
    assert parse_job(to_body(program)) == program
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__main__.py").touch()
    assert load_job(write("name: gpt\nscript: pkg\n")).launch.script == str(tmp_path / "pkg")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nodes: 1", "script: '' is not valid; expected a value: one of script, module and command is required"),
        (
            "script: train.py\nmodule: x",
            "script: 'train.py' is not valid; expected only one of script, module and command",
        ),
        ("module: x\ncommand: y", "script: '' is not valid; expected only one of script, module and command"),
        ("module: x y", "module: 'x y' is not valid; expected a module's dotted name"),
        ("command: ./tool", "command: './tool' is not valid; expected an existing file"),
        (
            "module: x\nenv_from: {A: {}}",
            "env_from.A: {} is not valid; expected either {file: PATH} or {command: COMMAND LINE}",
        ),
        ('module: x\nenv_from: {A: {command: "a \'b"}}', "a command line (No closing quotation)"),
        ("module: x\nenv: {A: 1}\nenv_from: {A: {file: /x}}", "variables that are not in env as well; A is in both"),
    ],
)
def test_what_no_worker_can_run(write: Any, text: str, said: str) -> None:
    (problem,) = problems(write(f"name: gpt\n{text}\n"))
    assert said in problem


def test_there_must_be_replicas_to_compare(write: Any) -> None:
    path = write("name: gpt\nscript: train.py\nnodes: 2\nmesh: {pp: 2}\nchecks: {replica_every_steps: 10}\n")
    (problem,) = problems(path)
    assert problem.startswith(
        "5: checks.replica_every_steps: 10 is not valid; expected a mesh with two replicas or more"
    )
    assert problems(write("name: gpt\nscript: train.py\nchecks: {replica_every_steps: -1}\n")) == [
        "3: checks.replica_every_steps: -1 is not valid; expected at least 0"
    ]


def test_every_mistake_is_named_at_once_with_its_line(write: Any) -> None:
    assert problems(
        write(
            """\
nam: gpt
name: GPT
script: train.py
nodes: "2"
nproc_per_node: yes
mesh: {dp: 3, pp: 0}
elastic:
  mindp: 1
args: [--fast, yes]
checkpoint: {keep: 1}
hang: {floor_s: .inf}
preload: ["no module", "data:a.b"]
"""
        )
    ) == [
        "1: nam: 'gpt' is not valid; expected a known key; did you mean 'name'?",
        "2: name: 'GPT' is not valid; expected 1 to 63 lower-case letters, digits and hyphens, "
        "a letter or digit first and last",
        "4: nodes: '2' is not valid; expected a valid integer",
        "5: nproc_per_node: True is not valid; expected a valid integer",
        "6: mesh.pp: 0 is not valid; expected at least 1",
        "8: elastic.mindp: 1 is not valid; expected a known key; did you mean 'min_dp'?",
        "9: args[1]: True is not valid; expected a valid string",
        "10: checkpoint.keep: 1 is not valid; expected at least 2",
        "11: hang.floor_s: inf is not valid; expected a finite number",
        "12: preload[0]: 'no module' is not valid; expected a module's dotted name, such as transformers.models.llama, or "
        "module:function",
        "12: preload[1]: 'data:a.b' is not valid; expected a module's dotted name, such as transformers.models.llama, or "
        "module:function",
    ]


def test_files_that_do_not_exist_and_a_range_that_cannot_be(write: Any, tmp_path: Path) -> None:
    assert problems(write("name: gpt\nscript: trian.py\npolicy: none.py\nnodes: 3\nelastic:\n  min_dp: 4\n")) == [
        f"2: script: 'trian.py' is not valid; expected an existing file; {tmp_path}/trian.py is not one",
        f"3: policy: 'none.py' is not valid; expected an existing file; {tmp_path}/none.py is not one",
        "6: elastic.min_dp: 4 is not valid; expected at most elastic.max_dp (3)",
    ]


def test_a_missing_field_points_at_the_file(write: Any) -> None:
    assert problems(write("\n\nscript: train.py\n")) == ["3: name: None is not valid; expected a value: it is required"]


def test_a_mesh_that_does_not_fill_the_ranks(write: Any) -> None:
    [problem] = problems(write("name: gpt\nscript: train.py\nnodes: 4\nmesh: {dp: 3}\n"))
    assert problem.startswith("4: mesh: 'dp 3' is not valid; expected a mesh of 4 nodes × 1 workers = 4 ranks")


def test_a_key_that_stands_twice(write: Any) -> None:
    assert problems(write("name: a\nscript: train.py\nname: b\n")) == [
        "3: name: 'name' is not valid; expected each key once; first on line 1"
    ]


@pytest.mark.parametrize(
    "text", ["", "- a\n", "just words", "a: [b\nc", "a: b: c", "\t", "a: !!python/object:os.x 1", "a: 2020-13-45"]
)
def test_what_is_no_job_file(write: Any, text: str) -> None:
    assert problems(write(text))


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="No such file"):
        load_job(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidSpec, match="not UTF-8"):
        load_job(tmp_path / "binary.yaml")


def test_aliases_cannot_make_it_slow(write: Any) -> None:
    bomb = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    assert "did you mean" in problems(write(bomb + "nam: x\n"))[-1]


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_no_text_raises_anything_but_invalid_spec(text: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InvalidSpec):
        load_job(path)


# ---------------------------------------------------------------- REST bodies


@given(spec=jobs(), name=st.from_regex(r"[a-z]([a-z0-9-]{0,8}[a-z0-9])?", fullmatch=True))
@settings(max_examples=50, deadline=None)
def test_a_body_is_the_spec_again(spec: JobSpec, name: str) -> None:
    body = to_body(spec) | {
        "name": name,
        "script": "/srv/train.py",
        "cwd": "",
        "policy": "/srv/policy.py",
        "preload": ["numpy"],
        "module": "",
        "command": "",
        "env": {"A": "b=c"},
        "env_from": {"TOKEN": {"file": "/run/token"}, "KEY": {"command": "vault read 'a b'"}},
        "checkpoint": {"interval_steps": 5, "keep": 2},
        "hang": {"floor_s": 1.0, "factor": 2.0, "init_s": 3.0},
        "limits": {},
        "warnings": {"settles_s": 30.0, "gap_s": 0},
        "spares": 0,
        "pool": "gpt",
        "report": {
            "price_per_gpu_hour": 2.5,
            "currency": "€",
            "peak_flops": 989e12,
            "restart_s": 250,
            "checkpoint_every_s": 600.0,
        },
    }
    assert parse_job(to_body(parse_job(json.loads(json.dumps(body))))) == parse_job(body)
    assert (parse_job(body).mesh, parse_job(body).launch.args) == (spec.mesh, spec.launch.args)
    assert parse_job(to_request(parse_job(body))) == parse_job(body)


def test_a_request_has_no_key_that_nobody_has_set() -> None:
    """Also a supervisor that does not know the newest keys accepts it."""
    given = {"name": "gpt", "module": "pkg.train", "nodes": 2, "checkpoint": {"keep": 3}, "env": {"A": "b"}}
    assert to_request(parse_job(given)) == given | {"mesh": {"dp": 2}, "elastic": {"min_dp": 2, "max_dp": 2}}


def test_what_a_report_needs_is_a_number_of_its_kind() -> None:
    def stated(**report: Any) -> Any:
        return parse_job({"name": "gpt", "script": "/x.py", "report": report}).report

    assert stated() == ReportSpec()
    assert stated(price_per_gpu_hour=0, flops_per_token=4.2e11).flops_per_token == 4.2e11
    for wrong in ({"restart_s": "250"}, {"price_per_gpu_hour": -1}, {"peak_flops": 0}, {"currency": ""}, {"prize": 1}):
        with pytest.raises(InvalidSpec, match="report"):
            stated(**wrong)


def checkpoint(**settings: Any) -> CheckpointSpec:
    return parse_job({"name": "gpt", "script": "/x.py", "checkpoint": settings}).checkpoint


def test_the_interval_is_chosen_unless_the_job_says_a_number() -> None:
    assert checkpoint().interval_steps == 0
    assert checkpoint(interval_steps="auto").interval_steps == 0
    assert checkpoint(interval_steps=7, store_interval_s="auto").store_interval_s == 0.0
    body = to_body(parse_job({"name": "gpt", "script": "/x.py"}))["checkpoint"]
    assert (body["interval_steps"], body["store_interval_s"]) == ("auto", 300.0)
    assert (
        JobFile.model_validate({"name": "gpt", "script": "/x"}).model_dump()["checkpoint"]["interval_steps"] == "auto"
    )


@pytest.mark.parametrize(("given", "seconds"), [("auto", 0.0), (60, 60.0)])
def test_the_limit_of_a_start_is_auto_or_a_number(given: object, seconds: float) -> None:
    spec = parse_job({"name": "gpt", "script": "/x.py", "limits": {"first_step_timeout_s": given}})
    assert spec.limits.first_step_timeout_s == seconds
    assert to_body(spec)["limits"]["first_step_timeout_s"] == given
    assert parse_job(to_body(spec)) == spec


@pytest.mark.parametrize(("steps", "store_s"), [(10, 3.0), (10, "auto"), ("auto", 3.0), ("auto", "auto")])
def test_a_number_or_auto_is_answered_as_it_was_given_and_without_a_warning(steps: int | str, store_s: object) -> None:
    given = {"interval_steps": steps, "store_interval_s": store_s}
    job = JobFile.model_validate({"name": "gpt", "script": "/x", "checkpoint": given})
    answered = json.loads(job.model_dump_json())["checkpoint"]  # warnings are errors
    assert {key: answered[key] for key in given} == given
    assert type(answered["interval_steps"]) is type(steps)


def test_where_the_object_store_is() -> None:
    assert checkpoint(store="gs://bucket/a/b/", store_keep=5).store == "gs://bucket/a/b"
    assert checkpoint(store="file:///mnt/nfs/ckpt").store == "file:///mnt/nfs/ckpt"


@pytest.mark.parametrize(
    ("text", "store", "job", "attempt", "step"),
    [
        ("gs://bucket/llm", "gs://bucket", "llm", None, None),
        ("gs://bucket/a/b/llm@1200", "gs://bucket/a/b", "llm", None, 1200),
        ("file:///mnt/ckpt/llm-2@1758000003/40", "file:///mnt/ckpt", "llm-2", 1758000003, 40),
    ],
)
def test_which_checkpoint_a_job_starts_from(
    text: str, store: str, job: str, attempt: int | None, step: int | None
) -> None:
    spec = parse_job({"name": "gpt", "script": "/x.py", "checkpoint": {"resume": text}})
    assert spec.resume == ResumeSpec(store, job, attempt, step)
    assert to_body(spec)["checkpoint"]["resume"] == text
    assert parse_job(to_body(spec)) == spec


@pytest.mark.parametrize(
    "text", ["llm", "gs://bucket", "gs://bucket/llm@", "gs://bucket/llm@0", "gs://bucket/llm@a/1", "s3://b/llm"]
)
def test_what_no_job_can_start_from(text: str) -> None:
    with pytest.raises(InvalidSpec, match=r"checkpoint\.resume: .* expected the store's URL, a slash and a job's name"):
        checkpoint(resume=text)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"interval_steps": 0}, "checkpoint.interval_steps: 0 is not valid; expected auto, or a number of steps"),
        ({"interval_steps": "often"}, "checkpoint.interval_steps: 'often' is not valid; expected auto, or a number"),
        ({"interval_steps": True}, "checkpoint.interval_steps: True is not valid; expected auto, or a number of steps"),
        ({"store_interval_s": -1}, "checkpoint.store_interval_s: -1 is not valid; expected auto, or a number of sec"),
        ({"store": "s3://bucket"}, "checkpoint.store: 's3://bucket' is not valid; expected gs://bucket/prefix, or"),
        ({"store": "file://relative"}, "checkpoint.store: 'file://relative' is not valid; expected gs://bucket/pre"),
        ({"interval_min_s": 9.0, "interval_max_s": 2.0}, "checkpoint.interval_min_s: 9.0 is not valid; expected at m"),
        ({"store_keep": 0}, "checkpoint.store_keep: 0 is not valid; expected at least 1"),
    ],
)
def test_what_a_checkpoint_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSpec, match=re.escape(said)):
        checkpoint(**settings)


def test_a_body_names_the_nodes_paths() -> None:
    with pytest.raises(InvalidSpecs, match=r"script: 'train\.py' is not valid; expected an absolute path"):
        parse_job({"name": "gpt", "script": "train.py"})
    assert parse_job({"name": "gpt", "script": "/on/the/nodes.py"}).launch.script == "/on/the/nodes.py"


@pytest.mark.parametrize(
    "body", [{}, {"name": 1}, {"name": "a", "script": ["x"]}, {"name": "a", "script": "/x", "mesh": []}]
)
def test_a_body_of_the_wrong_shape(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpecs) as caught:
        parse_job(body)
    assert all(problem.field for problem in caught.value.problems)


def test_the_schema_describes_every_key() -> None:
    assert set(schema()["properties"]) == set(to_body(parse_job({"name": "a", "script": "/x"})))


# ---------------------------------------------------------------- policies

A_SCALAR = "a string, a finite number, true or false"


def test_a_policy_may_have_parameters(write: Any, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("x = 1\n")
    spec = load_job(
        write(
            "name: gpt\nscript: train.py\npolicy: {file: p.py, params: {swaps: 3, share: 0.5, eager: true, to: n1}}\n"
        )
    )
    assert spec.policy_spec == PolicySpec(
        str(tmp_path / "p.py"), "x = 1\n", {"swaps": 3, "share": 0.5, "eager": True, "to": "n1"}
    )
    body = to_body(spec)
    assert parse_job(json.loads(json.dumps(body))) == spec
    assert "source" not in to_body(spec, policy_source=False)["policy"]


def test_the_text_of_a_policy_that_is_sent_along_needs_no_file() -> None:
    spec = parse_job({"name": "gpt", "script": "/x.py", "policy": {"file": "mine.py", "source": "x = 1\n"}})
    assert spec.policy_spec == PolicySpec("mine.py", "x = 1\n")


def test_a_policy_of_another_machine_is_read_there() -> None:
    assert parse_policy("/there/policy.py") == PolicySpec("/there/policy.py")
    assert parse_policy("plugin:mine") == PolicySpec("plugin:mine")
    assert parse_policy("") == PolicySpec()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("policy: {fil: p.py}", "3: policy.fil: 'p.py' is not valid; expected a known key; did you mean 'file'?"),
        (
            "policy: 7",
            "3: policy: 7 is not valid; expected the path of a script, plugin:NAME, or {file: …, params: {…}}",
        ),
        ("policy: {params: {a b: 1}}", "3: policy.params.a b: 'a b' is not valid; expected a name such as max_swaps"),
        (
            "policy: {params: {a: [1]}}",
            f"3: policy.params.a: [1] is not valid; expected {A_SCALAR}",
        ),
        (
            "policy: {params: {a: .inf}}",
            f"3: policy.params.a: inf is not valid; expected {A_SCALAR}",
        ),
    ],
)
def test_a_policy_that_cannot_be_meant(write: Any, line: str, said: str) -> None:
    assert problems(write(f"name: gpt\nscript: train.py\n{line}\n")) == [said]


@pytest.mark.parametrize(
    ("text", "said"),
    [(b" \n", "this one has 2"), (b"x = 1\n" * 20_000, "this one has 120,000"), (b"\xff", "a Python file in UTF-8")],
)
def test_a_policy_file_that_holds_no_policy(write: Any, tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "p.py").write_bytes(text)
    [problem] = problems(write("name: gpt\nscript: train.py\npolicy: p.py\n"))
    assert problem.startswith("3: policy: ")
    assert said in problem


@pytest.mark.parametrize("priority", [1001, -1001, "high", True, 1.5])
def test_a_priority_is_a_whole_number_within_bounds(priority: object) -> None:
    with pytest.raises(InvalidSpecs, match="priority"):
        parse_job({"name": "gpt", "script": "/x.py", "priority": priority})
