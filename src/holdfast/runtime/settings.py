"""Settings: one frozen class per service, read from the environment once, in `__main__`, and passed on from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import structlog
from pydantic import SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from holdfast.domain.errors import InvalidSpec, InvalidSpecs
from holdfast.domain.hosts import host_and_port
from holdfast.runtime.trust.fleet import Membership, fleet_name, read_tokens
from holdfast.runtime.trust.identities import Role, parse_spiffe
from holdfast.runtime.trust.renewal import report_expiry
from holdfast.runtime.trust.revocation import revocations_of
from holdfast.runtime.trust.tls import CA, CERT, IDENTITIES, Demand, Tls, require_whole

ENV_PREFIX = "HOLDFAST_"
log = structlog.get_logger("holdfast.runtime.settings")


class ServiceSettings(BaseSettings):
    """Settings of every service; a service adds its own fields. `redis_url` is read from `HOLDFAST_REDIS_URL`."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, frozen=True, extra="ignore", env_ignore_empty=True)

    ready_file: Path | None = None  # file that is written when the service is serving, with its endpoints
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["auto", "json", "console"] = "auto"  # auto: console on a terminal, JSON otherwise
    # SIGINT: SIGTERM is ignored. For schedulers that send it to every process of an allocation which ends: the services are
    # needed until the agents have left
    stop_signal: Literal["SIGTERM", "SIGINT"] = "SIGTERM"
    metrics_listen: str = ""  # host:port where Prometheus scrapes /metrics (port 0 takes any free one); empty = nowhere
    fleet: str = ""  # name of the fleet; empty = any, for an agent
    # Secret of the fleet: an agent and a service prove to each other that they have it. A file has one per line; the first is
    # used, all are accepted. Neither given = no proof is asked for
    join_token: SecretStr = SecretStr("")
    join_token_file: Path | None = None
    join_optional: bool = False  # also accept who has no join token at all, while a fleet is given one
    tls_cert: Path | None = None  # mutual TLS: all three or none
    tls_key: Path | None = None
    tls_ca: Path | None = None
    # Whether the other end's certificate must have an identity (holdfast://FLEET/ROLE). auto: if the own certificate has one
    tls_identities: Demand = "auto"
    tls_crl: Path | None = None  # certificates that were revoked: a CRL in PEM, signed by the CA
    tls_spiffe: str = ""  # which spiffe:// URIs are which identities: `runtime.identities`

    @property
    def tls(self) -> Tls | None:
        """Read the three files; None if TLS is not configured. Raises `InvalidSpec` for a file that cannot be read."""
        return Tls.load(
            cert=self.tls_cert,
            key=self.tls_key,
            ca=self.tls_ca,
            fleet=self.fleet,
            demand=self.tls_identities,
            spiffe=parse_spiffe(self.tls_spiffe),
            crl=self.crl,
        )

    @property
    def crl(self) -> Path | None:
        """The file of revoked certificates; None = none are known."""
        return self.tls_crl

    def tls_as(self, *roles: Role, name: str = "") -> Tls | None:
        """As `tls`. Raises `InvalidSpec` if the files cannot be used, or if the certificate has identities, and none in one of
        `roles` for `name`. Warns if identities are not checked, and if the CA has not signed the certificate."""
        loaded = self.tls
        if loaded is not None:
            loaded.require_usable()
            loaded.require(*roles, name=name)
            report_expiry(loaded)
            revocations_of(loaded)  # an agent reads it when it connects; what is wrong with it is said now
            if not loaded.signed_by_its_ca:
                log.warning(
                    "the CA has not signed this side's own certificate",
                    reason=f"{CERT}: {self.tls_cert}, {CA}: {self.tls_ca}",
                    advice="the other ends refuse it unless their CA file has another CA, which has signed it",
                )
            if loaded.proves_nothing:
                log.warning(
                    "any certificate of the CA is accepted for any node and service",
                    reason=f"the certificate has no identity ({CERT}: {self.tls_cert})",
                    advice=f"issue certificates with identities (docs/security.md), then set {IDENTITIES}=required",
                )
        return loaded

    @property
    def membership(self) -> Membership:
        """Read the join tokens. Raises `InvalidSpec` for what is none, without showing it."""
        tokens = read_tokens(self.join_token.get_secret_value(), self.join_token_file)
        return Membership(self.fleet, tokens, self.join_optional)

    @field_validator("metrics_listen")
    @classmethod
    def _metrics_listen_is_an_address(cls, value: str) -> str:
        return require_address(value)

    @field_validator("fleet")
    @classmethod
    def _fleet_is_a_name(cls, value: str) -> str:
        try:
            return fleet_name(value) if value else value
        except InvalidSpec as error:
            raise ValueError(error.expected) from None

    @field_validator("tls_spiffe")
    @classmethod
    def _spiffe_is_rules(cls, value: str) -> str:
        try:
            parse_spiffe(value)
        except InvalidSpec as error:
            raise ValueError(error.expected) from None
        return value

    @model_validator(mode="after")
    def _tls_is_whole(self) -> Self:
        require_whole(cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca)
        return self


def require_address(value: str) -> str:
    """Raises ValueError for a setting that is neither host:port nor empty."""
    if value and host_and_port(value) is None:
        raise ValueError("host:port (port 0 takes any free one)")
    return value


S = TypeVar("S", bound=BaseSettings)


def read_settings(kind: type[S]) -> S:
    """Read the environment. Raises `InvalidSpecs` with every missing or invalid variable."""
    try:
        return kind()
    except ValidationError as error:
        raise InvalidSpecs([_problem(detail) for detail in error.errors(include_url=False)]) from error


def _problem(detail: Any) -> InvalidSpec:
    variable = _variable(".".join(str(part) for part in detail["loc"]))
    if detail["type"] == "missing":
        return InvalidSpec(variable, None, "a value: it is required")
    return InvalidSpec(variable, detail["input"], _expected(detail["msg"]))


def _expected(message: str) -> str:
    """Convert pydantic's "Input should be a valid integer" to "expected a valid integer"."""
    return message.removeprefix("Value error, ").removeprefix("Input should be ")


def _variable(field: str) -> str:
    return field if field.isupper() else ENV_PREFIX + field.upper()  # an alias is the complete name of a variable
