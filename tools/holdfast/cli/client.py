"""The methods of the REST API, over `cli.connection`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from holdfast.cli.connection import OPERATION_TIMEOUT_S, Connection, Json, api_path
from holdfast.domain.checkpoints import CheckpointId
from holdfast.domain.errors import InvalidSpec, NotFound

LAUNCHER_TOKEN = "Holdfast-Launcher-Token"  # header of a submission
CHECKPOINT_TIMEOUT_S = 3600.0  # for all copies of a large state; the supervisor answers sooner


class Client(Connection):
    """The API at one endpoint. Use as a context manager. Methods raise what `Connection` raises: `NoApi`, `Unavailable`,
    `NotFound`, `Conflict`, `InvalidSpec`, or `HoldfastError` with the supervisor's reason."""

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
        return self.command("/v1/jobs", body, parameters=parameters, headers=headers)

    def attach(self, name: str, launcher: str) -> Json | None:
        """Return the job if it was submitted with this token; None if there is no job of the name. Raises `Conflict` if the job
        was submitted with another token."""
        try:
            return self.send("POST", api_path("jobs", name, "attach"), json={"token": launcher})
        except NotFound:
            return None

    def resume(self, name: str, step: int | None = None) -> Json:
        return self.command(api_path("jobs", name, "resume"), {"step": step})

    def job(self, name: str) -> Json:
        return self.get(api_path("jobs", name))

    def rank_log(self, name: str, rank: int, generation: int, offset: int, limit: int) -> Json:
        """Return a part of a rank's log, from the agent of its node; a negative `offset` counts from the end."""
        path = api_path("jobs", name, "ranks", str(rank), "log")
        return self.get(path, generation=generation, offset=offset, limit=limit)

    def ranks(self, name: str) -> Json:
        """Return every rank of the newest generation, in columns."""
        return self.get(api_path("jobs", name, "ranks"))

    def rank_measurements(self, name: str) -> Json:
        """Return what the agents measure of the ranks now, in columns."""
        return self.get(api_path("jobs", name, "ranks", "measurements"))

    def rank_errors(self, name: str, generation: int = 0) -> Json:
        """Return the exceptions of a generation's ranks from the agents, the first failure first; 0 = of the newest generation
        that has some."""
        return self.get(api_path("jobs", name, "errors"), generation=generation)

    def jobs(self) -> Iterator[Json]:
        return self.pages("/v1/jobs")

    def stop(self, name: str, reason: str, *, save: bool = True) -> Json:
        """Stop the job. With `save`, it saves a last checkpoint first, if it can."""
        return self.command(api_path("jobs", name, "stop"), {"reason": reason, "save": save})

    def checkpoint(self, name: str, grace_s: float | None = None) -> Json:
        """Save a checkpoint and wait until it has reached the job's last tier, for at most `grace_s`."""
        timeout_s = CHECKPOINT_TIMEOUT_S if grace_s is None else grace_s + OPERATION_TIMEOUT_S
        return self.command(api_path("jobs", name, "checkpoint"), {"grace_s": grace_s}, timeout_s)

    def resize(self, name: str, dp: int, reason: str) -> Json:
        return self.command(api_path("jobs", name, "resize"), {"dp": dp, "reason": reason})

    def policy(self, name: str) -> Json:
        return self.get(api_path("jobs", name, "policy"))

    def change_policy(self, name: str, body: str | Json) -> Json:
        """Change the policy. `body` has the form of `policy` in a job file."""
        return self.command(api_path("jobs", name, "policy"), {"policy": body})

    def policy_questions(self, name: str, *, since: float) -> Iterator[Json]:
        """Return the questions that the job's policies were asked since `since` (Unix seconds), newest first."""
        return self.pages(api_path("jobs", name, "policy", "questions"), since=since)

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
        # a supervisor of an earlier version has neither field
        given = {name: value for name, value in details.items() if value is not None}
        body = {"kind": kind, "rank": rank, "for_s": for_s, "xid": xid, **given}
        return self.command(api_path("jobs", name, "faults"), body)

    def goodput(self, name: str) -> Json:
        return self.get(api_path("jobs", name, "goodput"))

    def fleet_report(self, **parameters: Any) -> Json:
        """Return the report of all jobs within a range of time; `parameters`: its bounds, and terms instead of the jobs'."""
        return self.get("/v1/report", **parameters)

    def timeline(self, name: str) -> Json:
        """Steps, ranks, classes of goodput and incidents of the job's newest run over time."""
        return self.get(api_path("jobs", name, "timeline"))

    def checkpoints(self, name: str) -> Iterator[Json]:
        """Return the checkpoints on the job's nodes and in its object store, newest first."""
        return self.pages(api_path("jobs", name, "checkpoints"))

    def checkpoint_sources(self, name: str, attempt: int, step: int) -> Json:
        """Return the nodes from which the shards can be fetched, and the secret for it."""
        return self.get(api_path("jobs", name, "checkpoints", str(attempt), str(step), "sources"))

    def prune(self, name: str, steps: Iterable[CheckpointId]) -> Json:
        """Delete these (attempt, step) from the nodes."""
        body = {"steps": [{"attempt": attempt, "step": step} for attempt, step in steps]}
        return self.command(api_path("jobs", name, "checkpoints", "prune"), body)

    def checkpoint_holders(self, name: str, attempt: int, step: int) -> dict[int, list[str]]:
        """Return rank → connected nodes that hold its shard."""
        answer = self.get(api_path("jobs", name, "checkpoints", str(attempt), str(step)))
        return {int(rank): list(nodes) for rank, nodes in answer["ranks"].items()}

    # ------------------------------------------------------------------ nodes, incidents, actions

    def node(self, name: str) -> Json:
        return self.get(api_path("nodes", name))

    def gpus(self, node: str) -> Json:
        """The newest values of a node's GPUs."""
        return self.get(api_path("nodes", node, "gpus"))

    def nodes(self) -> Iterator[Json]:
        return self.pages("/v1/nodes")

    def cordon(self, name: str, reason: str) -> Json:
        return self.command(api_path("nodes", name, "cordon"), {"reason": reason})

    def uncordon(self, name: str, reason: str) -> Json:
        return self.command(api_path("nodes", name, "uncordon"), {"reason": reason})

    def repaired(self, name: str) -> Json:
        return self.command(api_path("nodes", name, "repair"), {})

    def restart_agent(self, name: str, reason: str) -> Json:
        return self.command(api_path("nodes", name, "restart-agent"), {"reason": reason})

    def announce(self, name: str, source: str, event: str, in_s: float | None) -> Json:
        body = {"event": event} if in_s is None else {"event": event, "in_s": in_s}
        return self.command(api_path("nodes", name, "notices", source), body, method="PUT")

    def withdraw(self, name: str, source: str) -> Json:
        return self.command(api_path("nodes", name, "notices", source), None, method="DELETE")

    def joining(self) -> Json:
        """Return the values for a machine that joins: the fleet's CA, its fingerprint, the port for agents."""
        return self.get("/v1/enrolment")

    def invite(self, digest: str, node: str, uses: int, ttl_s: float) -> Json:
        return self.command("/v1/invites", {"digest": digest, "node": node, "uses": uses, "ttl_s": ttl_s})

    def invites(self) -> Iterator[Json]:
        return self.pages("/v1/invites")

    def revoke_invite(self, invitation: str) -> Json:
        return self.command(f"/v1/invites/{quote(invitation, safe='')}", None, method="DELETE")

    def breaker(self) -> Json:
        return self.get("/v1/breaker")

    def reset_breaker(self, reason: str) -> Json:
        return self.command("/v1/breaker/reset", {"reason": reason})

    def incident(self, incident_id: str) -> Json:
        return self.get(api_path("incidents", incident_id))

    def trace(self, incident_id: str) -> Json:
        """Return the incident's spans, parents before their children."""
        return self.get(api_path("incidents", incident_id, "trace"))

    def incidents(self, job: str | None = None, node: str | None = None) -> Iterator[Json]:
        return self.pages("/v1/incidents", **_given(job=job, node=node))

    def finding(self, finding_id: str) -> Json:
        """Return one finding. Its id may contain slashes, because ids can contain directories."""
        if not finding_id:
            raise InvalidSpec("finding", finding_id, "an id; `holdfast explain` lists the latest")
        return self.get(f"/v1/findings/{quote(finding_id, safe='')}")

    def findings(self, job: str | None = None, node: str | None = None) -> Iterator[Json]:
        return self.pages("/v1/findings", **_given(job=job, node=node))

    def newest_findings(self, count: int, job: str | None = None) -> list[Json]:
        """Return the newest findings, by one request."""
        items: list[Json] = self.get("/v1/findings", limit=count, **_given(job=job))["items"]
        return items

    def actions(self, job: str | None = None) -> Iterator[Json]:
        return self.pages("/v1/actions", **_given(job=job))

    def audit(self, who: str, subject: str) -> Iterator[Json]:
        """Requests that changed something, newest first."""
        return self.pages("/v1/audit", **_given(who=who or None, subject=subject or None))

    def version(self) -> Json:
        """Return the version of the API. Raises `NoApi` if the URL is not a Holdfast API."""
        answer = self.get("/v1/version")
        if "protocol_version" not in answer:
            raise self.not_ours("its version has no protocol number")
        return answer

    def test_alerts(self) -> list[Json]:
        """Send a test alert to every address of the supervisor, and return what became of each."""
        return list(self.send("POST", "/v1/alerts/test")["addresses"])

    def kubernetes(self) -> Json:
        """Return the state of the leader's connection to the Kubernetes cluster. Raises `NotFound` if the API is too old."""
        return self.get("/v1/kubernetes")


def _given(**parameters: str | None) -> dict[str, str]:
    return {name: value for name, value in parameters.items() if value}
