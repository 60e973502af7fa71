"""The REST API as Python methods. problem+json responses are raised as exceptions.

Every POST has an Idempotency-Key, so that it can be repeated while there is no leader or after a lost answer; the supervisor
executes it once. Retries happen only in this module.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from holdfast.cli import api_token
from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, InvalidSpecs, NotFound, Unavailable
from holdfast.domain.hosts import is_loopback
from holdfast.runtime.api_trust import API_CA, Trust, answers_with_tls

DEFAULT_API_PORT = 8470
ENV_API = "HOLDFAST_API"
ENV_TOKEN = "HOLDFAST_API_TOKEN"
ENV_TOKEN_FILE = "HOLDFAST_API_TOKEN_FILE"
LAUNCHER_TOKEN = "Holdfast-Launcher-Token"  # header of a submission
REQUEST_TIMEOUT_S = 15.0
OPERATION_TIMEOUT_S = 60.0
CHECKPOINT_TIMEOUT_S = 3600.0  # for all copies of a large state; the supervisor answers sooner
OPERATION_POLL_S = 0.05
LEADER_TIMEOUT_S = 10.0  # longer than a standby needs to take over
LEADER_POLL_S = 0.1
PAGE_LIMIT = 200
TOKEN_BYTES_MAX = 16_384
QUOTED_CHARS_MAX = 200  # of an unexpected answer
PROBLEM = "application/problem+json"

Json = dict[str, Any]


class NoApi(Unavailable):
    """The URL does not answer, or is not a Holdfast API. Not raised for a Holdfast API without a leader."""


def default_url() -> str:
    """Return HOLDFAST_API, or the address of this machine's API: with TLS if that is what it speaks, and a CA is named."""
    if (given := os.environ.get(ENV_API)) is not None:
        return given
    url = f"https://127.0.0.1:{DEFAULT_API_PORT}"
    return url if Trust.of(os.environ).is_set and answers_with_tls(url) else f"http://127.0.0.1:{DEFAULT_API_PORT}"


def environment_token(environ: Mapping[str, str]) -> str:
    """Return HOLDFAST_API_TOKEN, or what is in HOLDFAST_API_TOKEN_FILE: of a token that something else renews. Empty without
    either. Raises `InvalidSpec`."""
    if (given := environ.get(ENV_TOKEN)) or not (file := environ.get(ENV_TOKEN_FILE)):
        return given or ""
    try:
        with open(file, "rb") as opened:
            token = opened.read(TOKEN_BYTES_MAX + 1).decode("ascii").strip()
    except OSError as error:
        raise InvalidSpec(ENV_TOKEN_FILE, file, f"a file with a token that can be read ({error.strerror})") from None
    except ValueError:
        token = ""
    if not 0 < len(token) <= TOKEN_BYTES_MAX or not token.isprintable():
        raise InvalidSpec(ENV_TOKEN_FILE, file, "a file with one token, and nothing else")
    return token


class Untrusted(NoApi):
    """The certificate of the API is not accepted, or only one of the two sides speaks TLS."""


class Client:
    """One API endpoint. Use as a context manager."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`token`: by default that of the API that this user has started on this machine, else that of the environment.

        Raises `InvalidSpec` if `url` is not an http URL, or if the file of a token, or of a CA that is named for https, cannot
        be used."""
        self.url = url.rstrip("/")
        self._clock, self._sleep = clock, sleep
        host = _host(self.url)
        if token is None:
            token = (api_token.find(self.url) if is_loopback(host) else "") or environment_token(os.environ)
        self._trust = Trust.of(os.environ)
        secure = self.url.startswith("https:") and transport is None
        self._http = httpx.Client(
            base_url=self.url,
            verify=self._trust.context(httpx.create_ssl_context) if secure else True,
            timeout=REQUEST_TIMEOUT_S,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            transport=transport,
            trust_env=not is_loopback(host),  # a proxy cannot reach this machine's own loopback
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    # ------------------------------------------------------------------ jobs

    def submit(
        self,
        body: Mapping[str, Any],
        *,
        resume: bool = False,
        fresh: bool = False,
        step: int | None = None,
        launcher: str = "",
    ) -> Json:
        """Submit a job and wait until the supervisor has accepted it.

        `resume`: start from the newest complete checkpoint of the name, or from that of `step`; `fresh`: start at step 0.
        `launcher`: a token with which `attach` finds the job again.
        Raises `Conflict` if a job of that name is running, or if it has checkpoints and neither `resume` nor `fresh` is set.
        """
        parameters = {"resume": "true"} if resume else {"fresh": "true"} if fresh else {}
        parameters |= {} if step is None else {"step": str(step)}
        headers = {LAUNCHER_TOKEN: launcher} if launcher else {}
        return self._command("/v1/jobs", body, parameters=parameters, headers=headers)

    def attach(self, name: str, launcher: str) -> Json | None:
        """Return the job if it was submitted with this token; None if there is no job of the name. Raises `Conflict` if the job
        was submitted with another token."""
        try:
            return self._led("POST", _path("jobs", name, "attach"), json={"token": launcher})
        except NotFound:
            return None

    def resume(self, name: str, step: int | None = None) -> Json:
        return self._command(_path("jobs", name, "resume"), {"step": step})

    def job(self, name: str) -> Json:
        return self._get(_path("jobs", name))

    def rank_log(self, name: str, rank: int, generation: int, offset: int, limit: int) -> Json:
        """Return a part of a rank's log, from the agent of its node; a negative `offset` counts from the end."""
        path = _path("jobs", name, "ranks", str(rank), "log")
        return self._get(path, generation=generation, offset=offset, limit=limit)

    def ranks(self, name: str) -> Json:
        """Return every rank of the newest generation, in columns."""
        return self._get(_path("jobs", name, "ranks"))

    def rank_measurements(self, name: str) -> Json:
        """Return what the agents measure of the ranks now, in columns."""
        return self._get(_path("jobs", name, "ranks", "measurements"))

    def rank_errors(self, name: str, generation: int = 0) -> Json:
        """Return the exceptions of a generation's ranks from the agents, the first failure first; 0 = of the newest generation
        that has some."""
        return self._get(_path("jobs", name, "errors"), generation=generation)

    def jobs(self) -> Iterator[Json]:
        return self._pages("/v1/jobs")

    def stop(self, name: str, reason: str, *, save: bool = True) -> Json:
        """Stop the job. With `save`, it saves a last checkpoint first, if it can."""
        return self._command(_path("jobs", name, "stop"), {"reason": reason, "save": save})

    def checkpoint(self, name: str, grace_s: float | None = None) -> Json:
        """Save a checkpoint and wait until it has reached the job's last tier, for at most `grace_s`."""
        timeout_s = CHECKPOINT_TIMEOUT_S if grace_s is None else grace_s + OPERATION_TIMEOUT_S
        return self._command(_path("jobs", name, "checkpoint"), {"grace_s": grace_s}, timeout_s)

    def resize(self, name: str, dp: int, reason: str) -> Json:
        return self._command(_path("jobs", name, "resize"), {"dp": dp, "reason": reason})

    def policy(self, name: str) -> Json:
        return self._get(_path("jobs", name, "policy"))

    def change_policy(self, name: str, body: str | Json) -> Json:
        """Change the policy. `body` has the form of `policy` in a job file."""
        return self._command(_path("jobs", name, "policy"), {"policy": body})

    def policy_questions(self, name: str, *, since: float) -> Iterator[Json]:
        """Return the questions that the job's policies were asked since `since` (Unix seconds), newest first."""
        return self._pages(_path("jobs", name, "policy", "questions"), since=since)

    def inject_fault(
        self,
        name: str,
        kind: str,
        rank: int,
        for_s: float,
        xid: int,
        *,
        loss_percent: float | None = None,
        offset_s: float | None = None,
    ) -> Json:
        """Inject a fault and wait for the answer of the agent on the rank's node or, for a fault of the control plane, of the
        leader.

        `loss_percent` is for a lossy link, `offset_s` for a jump of the clock.
        """
        details = {"loss_percent": loss_percent, "offset_s": offset_s}
        given = {
            name: value for name, value in details.items() if value is not None
        }  # a supervisor of an earlier version has neither field
        body = {"kind": kind, "rank": rank, "for_s": for_s, "xid": xid, **given}
        return self._command(_path("jobs", name, "faults"), body)

    def goodput(self, name: str) -> Json:
        return self._get(_path("jobs", name, "goodput"))

    def fleet_report(self, **parameters: Any) -> Json:
        """Return the report of all jobs within a range of time; `parameters`: its bounds, and terms instead of the jobs'."""
        return self._get("/v1/report", **parameters)

    def timeline(self, name: str) -> Json:
        """Steps, ranks, classes of goodput and incidents of the job's newest run over time."""
        return self._get(_path("jobs", name, "timeline"))

    def checkpoints(self, name: str) -> Iterator[Json]:
        """Return the checkpoints on the job's nodes and in its object store, newest first."""
        return self._pages(_path("jobs", name, "checkpoints"))

    def checkpoint_sources(self, name: str, attempt: int, step: int) -> Json:
        """Return the nodes from which the shards can be fetched, and the secret for it."""
        return self._get(_path("jobs", name, "checkpoints", str(attempt), str(step), "sources"))

    def prune(self, name: str, steps: Iterable[CheckpointId]) -> Json:
        """Delete these (attempt, step) from the nodes."""
        body = {"steps": [{"attempt": attempt, "step": step} for attempt, step in steps]}
        return self._command(_path("jobs", name, "checkpoints", "prune"), body)

    def checkpoint_holders(self, name: str, attempt: int, step: int) -> dict[int, list[str]]:
        """Return rank → connected nodes that hold its shard."""
        answer = self._get(_path("jobs", name, "checkpoints", str(attempt), str(step)))
        return {int(rank): list(nodes) for rank, nodes in answer["ranks"].items()}

    # ------------------------------------------------------------------ nodes, incidents, actions

    def node(self, name: str) -> Json:
        return self._get(_path("nodes", name))

    def gpus(self, node: str) -> Json:
        """The newest values of a node's GPUs."""
        return self._get(_path("nodes", node, "gpus"))

    def nodes(self) -> Iterator[Json]:
        return self._pages("/v1/nodes")

    def cordon(self, name: str, reason: str) -> Json:
        return self._command(_path("nodes", name, "cordon"), {"reason": reason})

    def uncordon(self, name: str, reason: str) -> Json:
        return self._command(_path("nodes", name, "uncordon"), {"reason": reason})

    def repaired(self, name: str) -> Json:
        return self._command(_path("nodes", name, "repair"), {})

    def restart_agent(self, name: str, reason: str) -> Json:
        return self._command(_path("nodes", name, "restart-agent"), {"reason": reason})

    def announce(self, name: str, source: str, event: str, in_s: float | None) -> Json:
        body = {"event": event} if in_s is None else {"event": event, "in_s": in_s}
        return self._command(_path("nodes", name, "notices", source), body, method="PUT")

    def withdraw(self, name: str, source: str) -> Json:
        return self._command(_path("nodes", name, "notices", source), None, method="DELETE")

    def joining(self) -> Json:
        """What a machine that joins must know: the fleet's CA, its fingerprint, the port for agents."""
        return self._get("/v1/enrolment")

    def invite(self, digest: str, node: str, uses: int, ttl_s: float) -> Json:
        return self._command("/v1/invites", {"digest": digest, "node": node, "uses": uses, "ttl_s": ttl_s})

    def invites(self) -> Iterator[Json]:
        return self._pages("/v1/invites")

    def revoke_invite(self, invitation: str) -> Json:
        return self._command(f"/v1/invites/{quote(invitation, safe='')}", None, method="DELETE")

    def breaker(self) -> Json:
        return self._get("/v1/breaker")

    def reset_breaker(self, reason: str) -> Json:
        return self._command("/v1/breaker/reset", {"reason": reason})

    def incident(self, incident_id: str) -> Json:
        return self._get(_path("incidents", incident_id))

    def trace(self, incident_id: str) -> Json:
        """Return the incident's spans, parents before their children."""
        return self._get(_path("incidents", incident_id, "trace"))

    def incidents(self, job: str | None = None, node: str | None = None) -> Iterator[Json]:
        return self._pages("/v1/incidents", **_given(job=job, node=node))

    def finding(self, finding_id: str) -> Json:
        """Return one finding. Its id may contain slashes, because ids can contain directories."""
        if not finding_id:
            raise InvalidSpec("finding", finding_id, "an id; `holdfast explain` lists the latest")
        return self._get(f"/v1/findings/{quote(finding_id, safe='')}")

    def findings(self, job: str | None = None, node: str | None = None) -> Iterator[Json]:
        return self._pages("/v1/findings", **_given(job=job, node=node))

    def actions(self, job: str | None = None) -> Iterator[Json]:
        return self._pages("/v1/actions", **_given(job=job))

    def audit(self, who: str, subject: str) -> Iterator[Json]:
        """Requests that changed something, newest first."""
        return self._pages("/v1/audit", **_given(who=who or None, subject=subject or None))

    def version(self) -> Json:
        """Return the version of the API. Raises `NoApi` if the URL is not a Holdfast API."""
        answer = self._get("/v1/version")
        if "protocol_version" not in answer:
            raise self._not_ours("its version has no protocol number")
        return answer

    def test_alerts(self) -> list[Json]:
        """Send a test alert to every address of the supervisor, and return what became of each."""
        return list(self._led("POST", "/v1/alerts/test")["addresses"])

    def kubernetes(self) -> Json:
        """Return the state of the leader's connection to the Kubernetes cluster. Raises `NotFound` if the API is too old."""
        return self._get("/v1/kubernetes")

    def events(self) -> Iterator[tuple[str, Json]]:
        """Yield server-sent events from now on: (type, data). Ends when the server closes the stream."""
        try:
            with self._http.stream("GET", "/v1/events", timeout=None) as response:
                self._raise_problem(response)
                kind = "message"
                for line in response.iter_lines():
                    if line.startswith("event:"):
                        kind = line[6:].strip()
                    elif line.startswith("data:"):
                        yield kind, self._event(line[5:])
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def _event(self, data: str) -> Json:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._not_ours("one of its events is not JSON") from error
        if not isinstance(event, dict):
            raise self._not_ours("one of its events is not a JSON object")
        return event

    # ------------------------------------------------------------------ transport

    def _get(self, path: str, **parameters: Any) -> Json:
        return self._led("GET", path, params=parameters)

    def _pages(self, path: str, **parameters: Any) -> Iterator[Json]:
        cursor: str | None = None
        while True:
            page = self._get(path, limit=PAGE_LIMIT, **parameters, **({"cursor": cursor} if cursor else {}))
            yield from page["items"]
            cursor = page.get("next_cursor")
            if not cursor:
                return

    def _command(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float = OPERATION_TIMEOUT_S,
        parameters: Mapping[str, str] | None = None,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
    ) -> Json:
        """Send the request and wait for its operation. (202 only means that it is in the supervisor's inbox.)"""
        key = {"Idempotency-Key": uuid.uuid4().hex}
        content = {} if body is None else {"json": dict(body)}
        operation = self._led(method, path, headers={**key, **(headers or {})}, params=parameters, **content)
        deadline = self._clock() + timeout_s
        while operation.get("state") == "pending":
            if self._clock() > deadline:
                raise Unavailable(
                    f"the supervisor accepted the request but did not complete it within {timeout_s:.0f} s; it may still "
                    f"complete it (operation {operation.get('id')})"
                )
            self._sleep(OPERATION_POLL_S)
            operation = self._get(_path("operations", str(operation["id"])))
        if operation.get("state") == "failed":
            raise HoldfastError(
                str(operation.get("reason") or "the supervisor rejected the request without a reason; see its log")
            )
        return operation

    def _led(self, method: str, path: str, **options: Any) -> Json:
        """Send a request, and repeat it while there is no leader. For a GET, or a POST with an Idempotency-Key."""
        deadline = self._clock() + LEADER_TIMEOUT_S
        while True:
            try:
                return self._request(method, path, **options)
            except NoApi:
                raise
            except Unavailable:
                if self._clock() > deadline:
                    raise
                self._sleep(LEADER_POLL_S)

    def _request(self, method: str, path: str, **options: Any) -> Json:
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        self._raise_problem(response)
        try:
            answer = response.json()
        except (ValueError, RecursionError) as error:
            raise self._not_ours("its answer is not JSON") from error
        if not isinstance(answer, dict):
            raise self._not_ours("its answer is not a JSON object")
        return answer

    def _raise_problem(self, response: httpx.Response) -> None:
        if response.is_success:
            return
        response.read()
        problem = _problem(response)
        if problem is None:
            raise self._not_ours(f"HTTP {response.status_code}: {response.text[:QUOTED_CHARS_MAX]!r}")
        detail = str(problem.get("detail") or problem.get("title") or f"HTTP {response.status_code}")
        match response.status_code:
            case 404:
                raise NotFound(detail)
            case 409:
                raise Conflict(detail)
            case 503:
                raise Unavailable(detail)
            case 422 if fields := _fields(problem):
                raise fields[0] if len(fields) == 1 else InvalidSpecs(fields)
            case _:
                raise HoldfastError(detail)

    def _unreachable(self, error: httpx.TransportError) -> Unavailable:
        if refusal := self._trust.refusal(error):
            return Untrusted(f"no connection to the Holdfast API at {self.url}: {refusal}")
        if (
            isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
            and self._is_plain
            and answers_with_tls(self.url)
        ):
            secure = "https" + self.url.removeprefix("http")
            return Untrusted(
                f"{self.url} answers with TLS only; set {ENV_API}={secure} (or --api), and {API_CA} to the file with its CA"
            )
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return NoApi(
                f"no Holdfast API answers at {self.url} ({error}); "
                f"start one with `holdfast up`, or set another URL with --api or {ENV_API}"
            )
        why = "no answer in time" if isinstance(error, httpx.TimeoutException) else str(error)
        return Unavailable(
            f"the connection to the Holdfast API at {self.url} failed ({why or type(error).__name__}); try again"
        )

    @property
    def _is_plain(self) -> bool:
        return self.url.startswith("http:")

    def _not_ours(self, why: str) -> NoApi:
        return NoApi(f"{self.url} is not a Holdfast API ({why}); set the correct URL with --api or {ENV_API}")


def _given(**parameters: str | None) -> dict[str, str]:
    return {name: value for name, value in parameters.items() if value}


def _host(url: str) -> str:
    """Return the host of `url`. Raises `InvalidSpec` if `url` is not an http URL."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InvalidSpec("--api", url, f"a URL such as http://127.0.0.1:{DEFAULT_API_PORT}")
    return parsed.host


def is_local(url: str) -> bool:
    """Whether only this machine reaches the URL. Raises `InvalidSpec` if it is not an http URL."""
    return is_loopback(_host(url))


def _path(collection: str, name: str, *rest: str) -> str:
    """Return `/v1/<collection>/<name>/…`. Percent-encodes each part, so that it is always a single path segment."""
    if name in ("", ".", "..") or "/" in name:
        raise InvalidSpec(collection.removesuffix("s"), name, f"a name; `holdfast {collection} list` shows the names")
    return "/".join(("/v1", collection, *(quote(part, safe="") for part in (name, *rest))))


def _problem(response: httpx.Response) -> Json | None:
    """Return the RFC 9457 body; None if the response has none."""
    if response.headers.get("content-type", "").partition(";")[0] != PROBLEM:
        return None
    try:
        problem = response.json()
    except (ValueError, RecursionError):
        return None
    return problem if isinstance(problem, dict) else None


def _fields(problem: Json) -> list[InvalidSpec]:
    """Return the errors of a request, one per field."""
    return [
        InvalidSpec(str(each.get("field", "?")), each.get("value"), str(each.get("expected") or each.get("detail")))
        for each in problem.get("errors") or ()
        if isinstance(each, dict)
    ]
