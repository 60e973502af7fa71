"""`/v1/people`: who may use this API, and who is notified of incidents. No secrets: neither tokens nor addresses of alerts."""

from __future__ import annotations

import time
from typing import Annotated

from pydantic import Field

from holdfast.runtime.trust.api_tokens import ApiRole
from holdfast.supervisor.api.access import guarded
from holdfast.supervisor.api.backend import Serving
from holdfast.supervisor.api.models import Model

router = guarded("/v1", tags=["operations"])


class TokenShown(Model):
    name: Annotated[str, Field(description="whose it is")]
    role: ApiRole
    created_at: Annotated[float, Field(description="Unix seconds")]
    expires_at: Annotated[float | None, Field(description="Unix seconds; null = never")]
    valid: Annotated[bool, Field(description="whether it has not expired")]


class OidcShown(Model):
    issuer: str
    audiences: Annotated[list[str], Field(description="one of which a token must be for")]
    roles: Annotated[list[str], Field(description="CLAIM:VALUE=ROLE; `*=ROLE`: of everybody with a token")]


class People(Model):
    admin_token: Annotated[bool, Field(description="whether HOLDFAST_API_TOKEN is set: its owner is an admin")]
    tokens: Annotated[list[TokenShown], Field(description="of HOLDFAST_API_TOKENS_FILE of the supervisor that answers")]
    oidc: Annotated[
        OidcShown | None, Field(description="the OpenID Connect issuer whose tokens count; null = none does")
    ]
    alert_addresses: Annotated[list[str], Field(description="scheme and host of each address")]
    alert_topics: Annotated[list[str], Field(description="what is sent to them")]


@router.get("/people")
async def get_people(backend: Serving) -> People:
    """Who may use this API, and which addresses get alerts, as the supervisor that answers is configured."""
    now, identity, alerts = time.time(), backend.identity, backend.alerts
    rules = identity.oidc.rules if identity.oidc is not None else None
    return People(
        admin_token=bool(identity.token),
        tokens=[
            TokenShown(
                name=each.name,
                role=each.role,
                created_at=each.created_at,
                expires_at=each.expires_at or None,
                valid=not each.is_over(now),
            )
            for each in (identity.tokens.all() if identity.tokens is not None else ())
        ],
        oidc=OidcShown(issuer=rules.issuer, audiences=list(rules.audiences), roles=[str(each) for each in rules.roles])
        if rules is not None
        else None,
        alert_addresses=list(alerts.names) if alerts is not None else [],
        alert_topics=list(alerts.topics) if alerts is not None else [],
    )
