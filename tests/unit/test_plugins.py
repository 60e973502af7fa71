"""What other packages bring may be broken in any way: it is left out and named, and everything else runs on."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import anyio
import plugged as packages
import pytest
from typer.testing import CliRunner

from holdfast import plugins
from holdfast.agent.collectors.plugged import Plugged as PluggedCollector
from holdfast.agent.collectors.protocol import Surroundings
from holdfast.agent.collectors.registry import build_all
from holdfast.cli.main import application
from holdfast.diagnostics.engine import Engine
from holdfast.diagnostics.plugged import FAILURES_MAX, plugged
from holdfast.domain.errors import InvalidSpec, PluginError, PolicyError
from holdfast.domain.job import PolicySpec
from holdfast.domain.signals import Measurements, NodeSignal
from holdfast.plugins import Group
from holdfast.stores import open_store, parse_url
from holdfast.supervisor.policies.script import PolicyScript

BROKEN = {"acme_broken": "import no_such_module_anywhere\n"}


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that is searched for packages, by this process and by its children."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    monkeypatch.setenv("PYTHONPATH", str(directory))
    before = set(sys.modules)
    yield directory
    for name in set(sys.modules) - before:
        if name.startswith("acme"):
            del sys.modules[name]


def surroundings(tmp_path: Path) -> Surroundings:
    return Surroundings("n0", tmp_path, tmp_path, tmp_path, tmp_path / "kmsg", infiniband=tmp_path / "none")


def measured(node: str = "n0", *, at: float = 1.0) -> Measurements:
    return Measurements(node, at, "inlet", ("inlet_c",), (60.0,))


def test_listing_imports_nothing(site: Path) -> None:
    packages.pretend(site, "acme", {"holdfast.detectors": {"drift": "acme_broken:build"}}, BROKEN)
    (found,) = plugins.installed(Group.DETECTORS)
    assert (found.name, found.package, str(found)) == ("drift", "acme 1.0", "drift (acme 1.0)")
    assert "acme_broken" not in sys.modules
    assert plugins.find(Group.DETECTORS, "drift") == found
    assert plugins.find(Group.COLLECTORS, "drift") is None


def test_two_packages_with_one_name_are_both_refused(site: Path) -> None:
    for package in ("acme-one", "acme-two"):
        packages.pretend(
            site, package, {"holdfast.detectors": {"drift": "acme_ok:build"}}, {"acme_ok": "build = print\n"}
        )
    for plugin in plugins.installed(Group.DETECTORS):
        with pytest.raises(PluginError, match="2 packages declare that name; uninstall all but one"):
            plugins.load(plugin, object)


def test_a_broken_collector_is_left_out(site: Path, tmp_path: Path) -> None:
    entries = {
        "broken": "acme_broken:build",
        "raises": "acme_ok:raises",
        "nothing": "acme_ok:nothing",
        "useless": "acme_ok:five",
    }
    source = "def raises(s): raise OSError('no device')\ndef nothing(s): return None\ndef five(s): return 5\n"
    own = {collector.name for collector in build_all(surroundings(tmp_path))}
    packages.pretend(site, "acme", {"holdfast.collectors": entries}, BROKEN | {"acme_ok": source})
    assert {collector.name for collector in build_all(surroundings(tmp_path))} == own


@pytest.mark.parametrize(
    ("signal", "error"),
    [("hot", TypeError), (measured("n1"), ValueError), (Measurements("n0", 1.0, "x", ("a", "b"), (1.0,)), Exception)],
    ids=["no signal", "another node's", "columns of unequal length"],
)
def test_what_no_agent_could_send_does_not_leave_the_collector(signal: NodeSignal, error: type[Exception]) -> None:
    emitted: list[NodeSignal] = []

    async def run(emit: object) -> None:
        emit(measured())  # type: ignore[operator]
        emit(signal)  # type: ignore[operator]

    collector = PluggedCollector("inlet", "n0", SimpleNamespace(name="inlet", run=run))
    with pytest.raises(error):
        anyio.run(collector.run, emitted.append)
    assert emitted == [measured()]


DETECTORS = """
from dataclasses import replace
from holdfast.domain.findings import Finding, FindingKind, Severity
from holdfast.domain.signals import Measurements

class Detector:
    reads = (Measurements,)
    def initial(self): return 0
    def observe(self, state, item, now, roster):
        if item.at < 0: raise ZeroDivisionError("a bug")
        if item.at == 0: return state, ("no finding",)
        name = f"hot:{item.at:.0f}:{state}"
        return state + 1, (Finding(name, FindingKind.DEGRADATION, Severity.WARNING, now, now, "hot", node=item.node),)

class NoReads: pass
class NoMemory(Detector):
    def initial(self): raise KeyError("memory")
"""


def test_a_detector_that_raises_forgets_and_is_left_out_in_the_end(site: Path) -> None:
    entries = {
        "hot": "acme_d:Detector",
        "no_reads": "acme_d:NoReads",
        "no_memory": "acme_d:NoMemory",
        "broken": "acme_broken:x",
    }
    packages.pretend(site, "acme", {"holdfast.detectors": entries}, BROKEN | {"acme_d": DETECTORS})
    (detector,) = plugged()
    engine = Engine((detector,))
    ids = [finding.id for at in (1.0, 2.0) for finding in engine.fold(measured(at=at), at).findings]
    assert ids == ["hot:1:0", "hot:2:1"]
    (found,) = engine.fold(measured(at=3.0), 3.0).findings
    assert found.evidence["plugin"] == "hot"
    assert not engine.fold(measured(at=-1.0), 4.0).findings
    assert [finding.id for finding in engine.fold(measured(at=5.0), 5.0).findings] == ["hot:5:0"], "without memory"
    for second in range(FAILURES_MAX):
        assert not engine.fold(measured(at=0.0), 6.0 + second).findings
    assert not engine.fold(measured(at=20.0), 20.0).findings, "left out"


STORES = "from holdfast.stores import StoreKind\nfrom holdfast.stores.memory import InMemory\n" + (
    "KIND = StoreKind('mem://name', lambda url: url.bucket != '', lambda url: InMemory())\n"
)


def test_schemes_of_stores(site: Path) -> None:
    entries = {"mem": "acme_s:KIND", "odd": "acme_s:InMemory", "broken": "acme_broken:KIND", "gs": "acme_s:KIND"}
    packages.pretend(site, "acme", {"holdfast.stores": entries}, BROKEN | {"acme_s": STORES})
    assert str(parse_url("mem://a/b/")) == "mem://a/b"
    assert list(open_store("mem://a").list("")) == []
    for url, expected in (
        ("mem://", "mem://… of mem"),
        ("odd://a", "not StoreKind"),
        ("broken://a", "no_such_module_anywhere"),
        ("gs://B", "gs://bucket/prefix"),
        ("s3://a", "mem://… of mem"),
    ):
        with pytest.raises(InvalidSpec, match=expected):
            parse_url(url)
    assert not isinstance(open_store("file:///tmp"), type(open_store("mem://a"))), "own schemes are not replaced"


def test_policies(site: Path) -> None:
    source = "from holdfast.policy import stop\ndef decide(incident, job): return stop('by acme')\nnumber = 5\n"
    entries = {"steady": "acme_p:decide", "odd": "acme_p:number", "broken": "acme_broken:decide"}
    packages.pretend(site, "acme", {"holdfast.policies": entries}, BROKEN | {"acme_p": source})
    done = CliRunner().invoke(application(), ["policy", "check", "plugin:steady"])
    assert done.exit_code == 0, done.output
    assert "by acme" in done.output
    for name, problem in (
        ("absent", "installed: broken, odd, steady"),
        ("odd", "int, not"),
        ("broken", "no_such_module"),
    ):
        with (
            PolicyScript(PolicySpec(f"plugin:{name}")) as policy,
            pytest.raises(PolicyError, match=f"plugin:{name}: .*{problem}"),
        ):
            policy.load()


def test_doctor_names_those_that_work_and_those_that_do_not(site: Path) -> None:
    packages.pretend(
        site,
        "acme",
        {
            "holdfast.detectors": {"drift": "acme_ok:build", "broken": "acme_broken:build", "number": "acme_ok:number"},
            "holdfast.policies": {"partial": "acme_ok:decide"},
        },
        BROKEN | {"acme_ok": "import functools\ndef build(): pass\nnumber = 5\ndecide = functools.partial(build)\n"},
    )
    done = CliRunner().invoke(application(), ["doctor"], env={"COLUMNS": "200"})
    assert done.exit_code == 1
    (works,) = (line for line in done.output.splitlines() if "detector drift" in line)
    (fails,) = (line for line in done.output.splitlines() if "detector broken" in line)
    assert "acme 1.0" in works
    assert "no_such_module_anywhere" in fails
    assert "left out" in fails
    for what, problem in (("detector number", "int, not"), ("policy partial", "partial, not function")):
        (wrong,) = (line for line in done.output.splitlines() if what in line)
        assert problem in wrong, "as the service itself refuses it"
