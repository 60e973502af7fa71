"""What the REST API answers: the base of all response models of `/v1`, operations, the service itself and problems. Times are
Unix seconds unless a field says otherwise.

The models of incidents, jobs and nodes are in `incident_models`, `job_models` and `node_models`, those of requests in `bodies`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Generic, Literal, Self, TypeVar, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model

T = TypeVar("T")
M = TypeVar("M", bound="Model")


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def of(cls, value: object, **others: object) -> Self:
        """Take the fields from the attributes of the same names of `value`, those of models in it likewise, except `others`."""
        same = {name: getattr(value, name) for name in cls.model_fields if name not in others}
        return cls.model_validate(same | others, from_attributes=True)


def fields_of(kind: type) -> Callable[[type[M]], type[M]]:
    """Give a model the fields of the dataclass `kind`, required and in their order, but those that it declares itself. A text
    in the `Annotated` of a field is its description."""

    def derived(model: type[M]) -> type[M]:
        own = {name: (field.annotation, field) for name, field in model.model_fields.items()}
        of_kind = {
            name: (hint, Field(description=next(iter(getattr(hint, "__metadata__", ())), None)))
            for name, hint in get_type_hints(kind, include_extras=True).items()
        }
        fields: dict[str, Any] = of_kind | own
        base = cast(type[M], Model)
        return create_model(model.__name__, __base__=base, __module__=model.__module__, __doc__=model.__doc__, **fields)

    return derived


class Page(Model, Generic[T]):
    """`next_cursor` goes into the next request's `cursor`; null = that was all."""

    items: list[T]
    next_cursor: str | None = None


class AlertAddress(Model):
    address: Annotated[str, Field(description="its number and its scheme, and of a webhook the host")]
    sent: bool
    problem: str


class AlertsTested(Model):
    addresses: Annotated[
        list[AlertAddress], Field(description="in the order of the settings; empty = none is configured")
    ]


# ---------------------------------------------------------------- operations, version, problems


class Operation(Model):
    """An accepted request. 202 says that it is on its way to the leader; `state` what became of it."""

    id: str
    url: str
    state: Literal["pending", "succeeded", "failed"]
    reason: str = ""


class Breaker(Model):
    """One for the fleet. Open: the supervisor watches, records and does not act on faults; healthy runs go on."""

    state: Literal["open", "closed"]
    reason: str = ""
    open_until: Annotated[float | None, Field(description="Unix seconds; it closes by itself then")] = None
    failed_nodes: Annotated[list[str], Field(description="nodes that were lost or failed within the window")]
    changes: Annotated[int, Field(description="generation changes within the window")]


class WatchedObjects(Model):
    """How well the leader sees one collection of objects of its cluster."""

    what: Annotated[str, Field(description="such as nodes, or pods of namespace ml")]
    problem: Annotated[
        str, Field(description="why it is not seen now: a right, the token, the API server; empty = it is")
    ]
    problem_since: Annotated[float | None, Field(description="Unix seconds; null: no problem")]
    confirmed_at: Annotated[
        float | None, Field(description="Unix seconds, when the API server last answered; null: never in this term")
    ]


class Kubernetes(Model):
    """The bridge to the cluster of the machines (docs/kubernetes.md). While there is a problem no notice is given or withdrawn,
    and notices end an hour after they were last confirmed."""

    watch: Annotated[bool, Field(description="HOLDFAST_KUBERNETES_WATCH of the supervisor that answers")]
    watched: Annotated[
        list[WatchedObjects], Field(description="empty: nothing is watched, or this supervisor does not lead")
    ]


class Version(Model):
    version: str
    protocol_version: int
    supervisor: str
    leader: Annotated[bool, Field(description="whether this supervisor leads")]
    leader_api: Annotated[str, Field(description="where the leader's API answers; empty = unknown")]
    standby_api: Annotated[
        str,
        Field(
            description="where the API of a standby answers; empty = none has asked for the lead in the last seconds"
        ),
    ] = ""
    standby_version: Annotated[str, Field(description="of that standby; empty = not known")] = ""
    trouble: Annotated[
        str,
        Field(description="why this supervisor makes no decisions; empty = it makes them, or another one leads"),
    ] = ""
    epoch: int
    event_log: Annotated[
        str, Field(description="this lifetime of the event log's server: another after each start; empty = it is away")
    ] = ""


class Health(Model):
    status: Literal["ok"]
    leader: bool


class FieldProblem(Model):
    """One mistake in a request."""

    field: str
    value: Any = None
    expected: str
    detail: str


class Problem(Model):
    """RFC 9457. Every error of this API has this body, as application/problem+json."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[FieldProblem] = []
    leader: Annotated[str | None, Field(description="on 503: where the leader's API answers")] = None
