"""What rank 0 reads from the supervisor's REST API: rate of the job, classes of goodput, incidents.

Read-only, with the standard library. Answers are checked as far as they are used, because versions may differ."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.domain.errors import InvalidSpec
from holdfast.domain.hosts import is_loopback
from holdfast.integrations.loggers.sink import PREFIX, Entry

ENV_API, ENV_TOKEN = "HOLDFAST_API", "HOLDFAST_API_TOKEN"
ENV_CA, ENV_SERVICE_CA = "HOLDFAST_API_CA", "HOLDFAST_TLS_CA"
TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 8 << 20
INCIDENTS_MAX = 50  # the newest of the job
ENDED = ("resolved", "failed")


@dataclass(frozen=True, slots=True)
class Facts:
    """One answer of the supervisor."""

    values: Mapping[str, float]
    incidents: tuple[Entry, ...]  # those that a process of this generation logs, oldest first


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The token must not reach another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Supervisor:
    """The API as seen by one generation of one job."""

    def __init__(
        self, url: str, token: str, *, job: str, generation: int, context: ssl.SSLContext | None = None
    ) -> None:
        """`context`: for https; None = the CAs of the system. Raises `InvalidSpec` if `url` is not an http URL."""
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidSpec(ENV_API, url, "a URL such as http://supervisor:8080")
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._job = job
        self._generation = generation
        handlers: list[urllib.request.BaseHandler] = [_NoRedirects()]
        if context is not None:
            handlers.append(urllib.request.HTTPSHandler(context=context))
        if is_loopback(parts.hostname):
            handlers.append(urllib.request.ProxyHandler({}))  # a proxy cannot reach this machine's own loopback
        self._opener = urllib.request.build_opener(*handlers)

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], *, job: str, generation: int) -> Supervisor | None:
        """Return the API that `environ` names; None if it names none, or no agent has started this process. Raises
        `InvalidSpec`."""
        url = environ.get(ENV_API, "")
        if not url or not job:
            return None
        context = _trust(environ) if url.startswith("https:") else None
        return cls(url, environ.get(ENV_TOKEN, ""), job=job, generation=generation, context=context)

    def read(self, step: int) -> Facts:
        """Ask. `step`: newest finished step, for incidents without one. Raises `OSError` if the API does not answer or refuses,
        `ValueError` if the answer is not what it should be."""
        name = urllib.parse.quote(self._job, safe="")
        job = self._get(f"/v1/jobs/{name}?ranks=false")
        goodput = self._get(f"/v1/jobs/{name}/goodput")
        query = urllib.parse.urlencode({"job": self._job, "limit": INCIDENTS_MAX})
        page = self._get(f"/v1/incidents?{query}")
        try:
            incidents = [
                _entry(incident, step)
                for incident in page["items"]
                if incident["fault_at"] >= job["submitted_at"] and self._is_ours(incident)
            ]
            return Facts(dict(_values(job, goodput)), tuple(reversed(incidents)))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"an answer of {self._url} lacks what is needed: {error!r}") from None

    def _is_ours(self, incident: Mapping[str, Any]) -> bool:
        """An incident that changed the generation is logged by the new one, any other by that in which it occurred."""
        logged_by = incident["new_generation"] or incident["generation"]
        return incident["state"] in ENDED and bool(logged_by == self._generation)

    def _get(self, path: str) -> dict[str, Any]:
        request = urllib.request.Request(self._url + path, headers=self._headers)  # the scheme is checked above
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                raw = answer.read(ANSWER_BYTES_MAX + 1)
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            raise
        if len(raw) > ANSWER_BYTES_MAX:
            raise ValueError(f"the answer to {path} is longer than {ANSWER_BYTES_MAX} bytes")
        value = json.loads(raw)
        if not isinstance(value, dict):
            raise ValueError(f"the answer to {path} is not a JSON object")
        return value


def _trust(environ: Mapping[str, str]) -> ssl.SSLContext:
    """As the `holdfast` command: only the CA of HOLDFAST_API_CA, or those of the system and HOLDFAST_TLS_CA."""
    only = environ.get(ENV_CA, "")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if only else ssl.create_default_context()
    file = only or environ.get(ENV_SERVICE_CA, "")
    try:
        if file:
            context.load_verify_locations(cafile=file)
    except OSError as error:  # SSLError is one
        name = ENV_CA if only else ENV_SERVICE_CA
        raise InvalidSpec(name, file, f"a PEM file with a CA ({error.strerror or error})") from error
    return context


def _values(job: Mapping[str, Any], goodput: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Names and values; what the supervisor does not know (null) is left out. No name is a folder of another one, which
    MLflow's file store could not keep."""
    prefix = f"{PREFIX}job/"
    named = {
        "tokens_per_s": job["tokens_per_s"],
        "goodput": goodput["goodput_job"],
        "useful_s": goodput["useful_s"],
        "unmeasured_s": goodput["unmeasured_s"],
        "wall_s": goodput["wall_s"],
        "rework_steps": goodput["rework_steps"],
        **{f"badput/{kind}_s": seconds for kind, seconds in goodput["badput_s"].items()},
    }
    return ((prefix + name, float(value)) for name, value in named.items() if value is not None)


def _entry(incident: Mapping[str, Any], step: int) -> Entry:
    """The marker is at the step that training continued from: that of the fault would be purged as a repeated one."""
    known = (incident["restored_step"], incident["last_step"], step)
    place = "".join(
        f", {name} {incident[name]}" for name in ("node", "rank", "gpu") if incident[name] not in (None, "")
    )
    lines = [f"Cause: {incident['cause']}"] if incident["cause"] else []
    if incident["action"]:
        lines.append(f"Action: {incident['action']['kind']}. {incident['action']['reason']}")
    if incident["first_step_at"] is not None:
        lines.append(f"Recovered {incident['first_step_at'] - incident['fault_at']:.1f} s after the fault.")
    if incident["rework_steps"]:
        lines.append(f"Steps repeated: {incident['rework_steps']}.")
    if incident["outcome"]:
        lines.append(f"Outcome: {incident['outcome']}")
    lines.append(f"Details: `holdfast incidents show {incident['id']}`")
    return Entry(
        id=str(incident["id"]),
        step=int(next(value for value in known if value is not None)),
        title=f"Incident {incident['id']}: {incident['kind']}{place}",
        text="\n\n".join(lines),
        is_incident=True,
    )
