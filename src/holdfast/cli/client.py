"""The REST API as Python calls, for the commands. Errors come back as what they are: problem+json becomes an exception."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Self

import httpx

from holdfast.domain.errors import Conflict, HoldfastError, InvalidSpec, NotFound, Unavailable

DEFAULT_API_PORT = 8470
ENV_API = "HOLDFAST_API"
ENV_TOKEN = "HOLDFAST_API_TOKEN"
REQUEST_TIMEOUT_S = 15.0
OPERATION_TIMEOUT_S = 60.0
OPERATION_POLL_S = 0.05
PAGE_LIMIT = 200

Json = dict[str, Any]


def default_url() -> str:
    return os.environ.get(ENV_API, f"http://127.0.0.1:{DEFAULT_API_PORT}")


class Client:
    """One API endpoint. Use as a context manager."""

    def __init__(self, url: str, *, token: str | None = None, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url.rstrip("/")
        token = os.environ.get(ENV_TOKEN) if token is None else token
        self._http = httpx.Client(
            base_url=self.url,
            timeout=REQUEST_TIMEOUT_S,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            transport=transport,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    # ------------------------------------------------------------------ jobs

    def submit(self, body: Mapping[str, Any]) -> Json:
        """Submit a job; returns when the supervisor has accepted it. Raises `Conflict` when one of that name is running."""
        return self._command("/v1/jobs", body)

    def job(self, name: str) -> Json:
        return self._get(f"/v1/jobs/{name}")

    def jobs(self) -> Iterator[Json]:
        return self._pages("/v1/jobs")

    def stop(self, name: str, reason: str) -> Json:
        return self._command(f"/v1/jobs/{name}/stop", {"reason": reason})

    def checkpoint(self, name: str) -> Json:
        return self._command(f"/v1/jobs/{name}/checkpoint", {})

    def resize(self, name: str, dp: int, reason: str) -> Json:
        return self._command(f"/v1/jobs/{name}/resize", {"dp": dp, "reason": reason})

    def goodput(self, name: str) -> Json:
        return self._get(f"/v1/jobs/{name}/goodput")

    # ------------------------------------------------------------------ nodes, incidents, actions

    def node(self, name: str) -> Json:
        return self._get(f"/v1/nodes/{name}")

    def nodes(self) -> Iterator[Json]:
        return self._pages("/v1/nodes")

    def cordon(self, name: str, reason: str) -> Json:
        return self._command(f"/v1/nodes/{name}/cordon", {"reason": reason})

    def uncordon(self, name: str, reason: str) -> Json:
        return self._command(f"/v1/nodes/{name}/uncordon", {"reason": reason})

    def repaired(self, name: str) -> Json:
        return self._command(f"/v1/nodes/{name}/repair", {})

    def incident(self, incident_id: str) -> Json:
        return self._get(f"/v1/incidents/{incident_id}")

    def incidents(self, job: str | None = None) -> Iterator[Json]:
        return self._pages("/v1/incidents", **({"job": job} if job else {}))

    def actions(self, job: str | None = None) -> Iterator[Json]:
        return self._pages("/v1/actions", **({"job": job} if job else {}))

    def version(self) -> Json:
        return self._get("/v1/version")

    def events(self) -> Iterator[tuple[str, Json]]:
        """Server-sent events from now on: (type, data). Ends when the server closes the stream."""
        try:
            with self._http.stream("GET", "/v1/events", timeout=None) as response:
                _raise_problem(response)
                kind = "message"
                for line in response.iter_lines():
                    if line.startswith("event:"):
                        kind = line[6:].strip()
                    elif line.startswith("data:"):
                        yield kind, json.loads(line[5:])
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    # ------------------------------------------------------------------ transport

    def _get(self, path: str, **parameters: Any) -> Json:
        return self._request("GET", path, params=parameters)

    def _pages(self, path: str, **parameters: Any) -> Iterator[Json]:
        cursor: str | None = None
        while True:
            page = self._get(path, limit=PAGE_LIMIT, **parameters, **({"cursor": cursor} if cursor else {}))
            yield from page["items"]
            cursor = page.get("next_cursor")
            if not cursor:
                return

    def _command(self, path: str, body: Mapping[str, Any]) -> Json:
        """POST and wait for the operation: 202 only says that the request is in the supervisor's inbox."""
        operation = self._request("POST", path, json=dict(body))
        deadline = time.monotonic() + OPERATION_TIMEOUT_S
        while operation.get("state") == "pending":
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"the supervisor accepted POST {path} but did not act on it within {OPERATION_TIMEOUT_S:.0f} s; "
                    f"operation {operation.get('id')} goes on there"
                )
            time.sleep(OPERATION_POLL_S)
            operation = self._get(f"/v1/operations/{operation['id']}")
        if operation.get("state") == "failed":
            raise HoldfastError(str(operation.get("reason") or f"POST {path} failed"))
        return operation

    def _request(self, method: str, path: str, **options: Any) -> Json:
        try:
            response = self._http.request(method, path, **options)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        _raise_problem(response)
        answer: Json = response.json()
        return answer

    def _unreachable(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"no Holdfast API answers at {self.url} ({error}); start one with `holdfast up` or name it with --api / {ENV_API}"
        )


def _raise_problem(response: httpx.Response) -> None:
    if response.is_success:
        return
    response.read()
    try:
        problem = response.json()
    except ValueError:
        problem = {"detail": response.text[:200]}
    detail = str(problem.get("detail") or problem.get("title") or f"HTTP {response.status_code}")
    if errors := problem.get("errors"):
        detail += "".join(f"\n  {e.get('field', '?')}: {e.get('detail', e)}" for e in errors)
    match response.status_code:
        case 404:
            raise NotFound(detail)
        case 409:
            raise Conflict(detail)
        case 503:
            raise Unavailable(detail)
        case 422 if len(problem.get("errors") or ()) == 1 and "value" in problem["errors"][0]:
            only = problem["errors"][0]
            raise InvalidSpec(str(only["field"]), only["value"], str(only.get("expected") or only.get("detail")))
        case _:
            raise HoldfastError(detail)
