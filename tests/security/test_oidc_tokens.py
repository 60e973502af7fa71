"""What somebody may try with tokens of an OpenID Connect issuer, and what an issuer may answer. The issuer is a real one."""

from __future__ import annotations

import base64
import gzip
import hashlib
import hmac
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import certificates
import pytest
from joserfc.jwk import OctKey
from oidc_issuer import AUDIENCE, Issuer, answering, ec, issuing, rsa
from ports import port_of, reserve_port
from structlog.testing import capture_logs

from holdfast.domain.errors import InvalidSpec, Unavailable
from holdfast.runtime.trust import oidc, oidc_keys
from holdfast.runtime.trust.api_tokens import ApiRole
from holdfast.runtime.trust.oidc import InvalidToken, OidcPerson, OidcRules, OidcTokens, parse_roles
from holdfast.runtime.trust.oidc_keys import DISCOVERY, DOCUMENT_BYTES_MAX, KEPT_S, REFETCH_S, REFRESH_S, RETRY_S

pytestmark = pytest.mark.anyio

# The accepted token that each attack starts from is accepted, or the attack would prove nothing: `test_a_valid_token…`.


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with issuing(rsa("k1"), ec("k2")) as made:
        yield made


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def found(tokens: OidcTokens, token: str, now: float | None = None) -> OidcPerson:
    await tokens.prepare(token)
    return tokens.find(token, time.time() if now is None else now)


async def refusal(tokens: OidcTokens, token: str, now: float | None = None) -> str:
    with pytest.raises(InvalidToken) as refused:
        await found(tokens, token, now)
    return str(refused.value)


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


@pytest.mark.parametrize(("number", "algorithm"), [
    *((0, each) for each in ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")), (1, "ES256"),
])  # fmt: skip
async def test_a_valid_token_says_who_and_with_which_role(issuer: Issuer, number: int, algorithm: str) -> None:
    token = issuer.token(key=issuer.keys[number], alg=algorithm, groups=["researchers"], exp=int(time.time()) + 60)
    person = await found(issuer.tokens(), token)
    assert (person.name, person.role) == ("oidc:ada", ApiRole.SUBMITTER)
    assert person.expires_at == pytest.approx(time.time() + 60, abs=5)


# ---------------------------------------------------------------- forged


async def test_a_token_without_a_signature_is_nobodys(issuer: Issuer) -> None:
    tokens, claims = issuer.tokens(), encoded(issuer.claims(groups=["ml-platform"]))
    for algorithm in ("none", "None", "NONE", "nOnE", ""):
        assert "algorithm" in await refusal(tokens, f"{encoded({'alg': algorithm, 'kid': 'k1'})}.{claims}.")
    header, body, _ = issuer.token().split(".")
    for signature in ("", "AAAA", "A" * 342):
        assert "signature" in await refusal(tokens, f"{header}.{body}.{signature}")


@pytest.mark.parametrize("algorithm", ["HS256", "HS384", "HS512"])
async def test_the_public_key_is_no_secret_to_sign_with(issuer: Issuer, algorithm: str) -> None:
    key = rsa("k1")
    for secret in (key.as_pem(private=False), key.as_pem(private=False).strip(), json.dumps(key.as_dict()).encode()):
        text = f"{encoded({'alg': algorithm, 'kid': 'k1'})}.{encoded(issuer.claims())}"
        mac = hmac.new(secret, text.encode(), getattr(hashlib, f"sha{algorithm[2:]}")).digest()
        assert "algorithm" in await refusal(
            issuer.tokens(), f"{text}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"
        )


async def test_a_secret_among_the_published_keys_verifies_nothing(issuer: Issuer) -> None:
    issuer.keys.append(OctKey.import_key("k" * 32, {"kid": "secret"}))
    document = issuer.documents["/keys"]
    document["keys"][-1]["k"] = base64.urlsafe_b64encode(b"k" * 32).decode().rstrip("=")
    issuer.answers["/keys"] = answering(200, json.dumps(document).encode())
    tokens = issuer.tokens()
    assert "algorithm" in await refusal(tokens, issuer.token(key=issuer.keys[-1], alg="HS256"))
    assert "does not publish" in await refusal(tokens, issuer.token(header={"kid": "secret"}))


async def test_claims_that_were_changed_do_not_fit_to_the_signature(issuer: Issuer) -> None:
    header, _, signature = issuer.token().split(".")
    forged = f"{header}.{encoded(issuer.claims(groups=['ml-platform']))}.{signature}"
    assert "signature" in await refusal(issuer.tokens(), forged)
    assert "signature" in await refusal(issuer.tokens(), issuer.token(key=rsa("other"), header={"kid": "k1"}))


async def test_no_key_comes_from_the_token(issuer: Issuer) -> None:
    """Neither is an address in a header asked, nor a path in a `kid`."""
    other = rsa("other")
    mine = other.as_dict(private=False)
    with issuing(other) as attacker:
        for header in (
            {"jku": f"{attacker.url}/keys"}, {"x5u": f"{attacker.url}/keys"}, {"jwk": mine}, {"x5c": ["MIIB"]},
            {"jku": f"{attacker.url}/keys", "kid": "k1"}, {"jwk": mine, "kid": "k1"}, {"kid": f"{attacker.url}/keys"},
            {"kid": "../../../dev/null"}, {"kid": "/etc/passwd"}, {"kid": "' OR 1=1 --"}, {"kid": ""}, {"kid": None},
            {"kid": "k1\0"}, {"kid": "K1"}, {"kid": "k" * 257}, {"kid": ["k1"]}, {"kid": 1},
            {"crit": ["exp"], "kid": "k1"}, {"b64": False, "crit": ["b64"], "kid": "k1"},
        ):  # fmt: skip
            assert await refusal(issuer.tokens(), _signed(issuer, other, header))
        assert attacker.asked == []
    assert set(issuer.asked) <= {DISCOVERY, "/keys"}


def _signed(issuer: Issuer, key: Any, header: dict[str, Any]) -> str:
    """With a header that the library would not write."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    fields = {name: value for name, value in {"alg": "RS256", "kid": key.kid, **header}.items() if value is not None}
    text = f"{encoded(fields)}.{encoded(issuer.claims(groups=['ml-platform']))}"
    signature = key.private_key.sign(text.encode(), padding.PKCS1v15(), hashes.SHA256())
    return f"{text}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


async def test_a_key_is_for_its_own_algorithm_and_use(issuer: Issuer) -> None:
    small, weak, wide = rsa("enc"), rsa("weak", 1024), ec("wide", "P-384")
    issuer.keys += [small, weak, wide]
    document = issuer.documents["/keys"]
    by_kid = {each["kid"]: each for each in document["keys"]}
    by_kid["enc"]["use"] = "enc"
    by_kid["k1"]["alg"] = "RS256"
    issuer.answers["/keys"] = answering(200, json.dumps(document).encode())
    tokens = issuer.tokens()
    assert await found(tokens, issuer.token())
    for kid, algorithm, key in (("enc", "RS256", small), ("weak", "RS256", weak), ("k1", "PS256", rsa("k1"))):
        assert "does not publish" in await refusal(tokens, issuer.token(key=key, alg=algorithm, header={"kid": kid}))
    header, body, signature = issuer.token(key=issuer.keys[1], alg="ES256").split(".")
    forged = f"{encoded({'alg': 'ES256', 'kid': 'wide'})}.{body}.{signature}"
    assert "signature" in await refusal(tokens, forged)
    assert header


# ---------------------------------------------------------------- meant for somebody else, or another time


@pytest.mark.parametrize(("claims", "says"), [
    ({"iss": "https://evil.example"}, "iss"), ({"iss": None}, "iss"), ({"iss": ["https://evil.example"]}, "iss"),
    ({"aud": "another"}, "aud"), ({"aud": None}, "aud"), ({"aud": []}, "aud"), ({"aud": ["a", "b"]}, "aud"),
    ({"aud": {AUDIENCE: 1}}, "aud"), ({"aud": AUDIENCE + "x"}, "aud"),
    ({"azp": "another"}, "azp"), ({"azp": [AUDIENCE]}, "azp"),
    ({"exp": None}, "exp"), ({"exp": "9999999999"}, "exp"), ({"exp": True}, "exp"), ({"exp": 1e300}, "exp"),
    ({"exp": 1}, "expired"), ({"nbf": 4e9}, "nbf"), ({"iat": 4e9}, "iat"), ({"nbf": "soon"}, "nbf"),
    ({"cnf": {"jkt": "x"}}, "cnf"), ({"events": {"http://schemas.openid.net/event/backchannel-logout": {}}}, "event"),
    ({"sub": None}, "sub"), ({"sub": ""}, "sub"), ({"sub": "a\nb"}, "sub"), ({"sub": " a"}, "sub"), ({"sub": "a" * 201}, "sub"),
    ({"sub": 7}, "sub"), ({"sub": ["ada"]}, "sub"),
])  # fmt: skip
async def test_claims_that_are_not_accepted(issuer: Issuer, claims: dict[str, Any], says: str) -> None:
    assert says in await refusal(issuer.tokens(), issuer.token(**claims))


async def test_a_slash_makes_another_issuer(issuer: Issuer) -> None:
    assert "iss" in await refusal(issuer.tokens(), issuer.token(iss=f"{issuer.url}/"))


async def test_clocks_may_differ_by_half_a_minute_and_not_more(issuer: Issuer) -> None:
    tokens, now = issuer.tokens(), int(time.time())
    token = issuer.token(exp=now, nbf=now, iat=now)
    assert await found(tokens, token, now + oidc.LEEWAY_S - 1)
    assert await refusal(tokens, token, now + 300) == "it has expired, 300 s ago by the clock of this supervisor"
    assert "has expired" in await refusal(tokens, token, now + oidc.LEEWAY_S)
    early = issuer.token(exp=now + 600, nbf=now, iat=now)
    assert await found(tokens, early, now - oidc.LEEWAY_S)
    assert await refusal(tokens, early, now - oidc.LEEWAY_S - 1)
    for claim, nbf, iat in (("nbf", now, now - 300), ("iat", now - 300, now)):
        said = await refusal(tokens, issuer.token(exp=now + 600, nbf=nbf, iat=iat), now - 300)
        assert said.startswith(f"it begins to be valid in 300 s ({claim}) by the clock of this supervisor"), said
        assert said.endswith("correct the clock that is wrong")


async def test_other_tokens_of_the_issuer_sign_nobody_in(issuer: Issuer) -> None:
    for kind in ("logout+jwt", "secevent+jwt", "dpop+jwt", "application/logout+jwt", "LOGOUT+JWT"):
        assert "type" in await refusal(issuer.tokens(), issuer.token(header={"typ": kind}))
    assert "type" in await refusal(issuer.tokens(), _signed(issuer, issuer.keys[0], {"typ": 7}))
    assert await found(issuer.tokens(), issuer.token(header={"typ": "at+jwt"}))


async def test_several_audiences_and_the_client_that_asked(issuer: Issuer) -> None:
    tokens = issuer.tokens(audiences=("holdfast", "holdfast-cli"))
    assert await found(tokens, issuer.token(aud=["other", "holdfast"], azp="holdfast-cli"))
    assert "azp" in await refusal(tokens, issuer.token(aud=["other", "holdfast"], azp="other"))


async def test_what_is_no_token_costs_nothing(issuer: Issuer) -> None:
    tokens = issuer.tokens()
    deep = base64.urlsafe_b64encode(b'{"alg":' + b"[" * 2900).decode().rstrip("=")
    huge = issuer.token(groups=["g" * 20_000])
    for token in (
        huge, "eyJ.." + "A" * 1_000_000, "", "..", "eyJ", "eyJ..", "eyJhbGciOiJSUzI1NiJ9", f"{deep}.e30.AA", "eyJ9.e30.AA",
        f"{encoded({'alg': ['RS256']})}.e30.AA", f"{encoded({'alg': {'RS256': 1}})}.e30.AA", issuer.token() + ".x",
        issuer.token() + "\n", issuer.token().replace(".", "..", 1),
    ):  # fmt: skip
        began_s = time.process_time()
        assert await refusal(tokens, token)
        assert time.process_time() - began_s < 1
    assert issuer.asked == [], "none of them is worth a question"
    header = encoded({"alg": "RS256", "kid": "k1", "x": "y" * 5000})
    assert "header" in await refusal(tokens, f"{header}.e30.AA")


async def test_signed_claims_that_are_no_object_are_refused(issuer: Issuer) -> None:
    from joserfc import jws

    for payload in (b"[]", b"7", b'"x"', b"\xff", b"{" * 2000, b"[" * 5000, b'{"exp":NaN}'):
        token = jws.serialize_compact({"alg": "RS256", "kid": "k1"}, payload, issuer.keys[0], algorithms=["RS256"])
        assert await refusal(issuer.tokens(), token)


# ---------------------------------------------------------------- names and roles


async def test_names_cannot_be_those_of_other_tokens(issuer: Issuer) -> None:
    for name in ("admin", "oidc:admin"):
        person = await found(issuer.tokens(), issuer.token(sub=name))
        assert person.name == f"oidc:{name}"


async def test_an_address_that_the_issuer_has_not_verified_names_nobody(issuer: Issuer) -> None:
    tokens = issuer.tokens(name="email")
    assert (await found(tokens, issuer.token(email="a@b.c", email_verified=True))).name == "oidc:a@b.c"
    assert (await found(tokens, issuer.token(email="a@b.c"))).name == "oidc:a@b.c"
    strange: tuple[Any, ...] = (False, "false", 0, [])
    for verified in strange:
        assert "not verified" in await refusal(tokens, issuer.token(email="a@b.c", email_verified=verified))
    assert "email" in await refusal(tokens, issuer.token())


@pytest.mark.parametrize(("rules", "claims", "role"), [
    ("groups:a=operator, *=viewer", {"groups": ["b", "a"]}, "operator"),
    ("groups:a=operator, *=viewer", {"groups": "a"}, "operator"),
    ("groups:a=operator, *=viewer", {"groups": "ab"}, "viewer"),  # no part of a text
    ("groups:a=operator", {"groups": {"a": 1}}, None), ("groups:a=operator", {}, None),
    ("groups:1=admin", {"groups": [1]}, None),
    ("g:a=viewer\ng:b=admin\ng:c=submitter", {"g": ["a", "b", "c"]}, "admin"),  # the highest
    ("g:CN=ml,OU=x, y=operator, *=viewer", {"g": ["CN=ml,OU=x, y"]}, "operator"),
    ("sub:system:serviceaccount:ci:bot=submitter", {"sub": "system:serviceaccount:ci:bot"}, "submitter"),
    ('"cognito:groups":ops=operator', {"cognito:groups": ["ops"]}, "operator"),
    ("realm_access.roles:ml=operator", {"realm_access": {"roles": ["ml"]}}, "operator"),
    ('"https://example.org/groups":ml=operator', {"https://example.org/groups": ["ml"]}, "operator"),
    ("a.b:x=operator", {"a": "x"}, None), ("a.b:x=operator", {"a": {"b": {"x": 1}}}, None),
])  # fmt: skip
def test_roles_of_claims(rules: str, claims: dict[str, Any], role: str | None) -> None:
    assert oidc.role_of(claims, parse_roles(rules)) == role
    assert parse_roles(", ".join(map(str, parse_roles(rules)))) == parse_roles(rules)


@pytest.mark.parametrize("text", [
    "", " ", ",", "groups=operator", "groups:a=root", "groups:a", "=viewer", ":a=viewer", "groups:=viewer", "groups: =viewer",
    "*", "*=", "*:a=viewer", "groups:a=operator *=viewer b", "groups:a=viewer,b=operator", "*=VIEWER", "*=viewer;*=admin",
    ",".join(["*=viewer"] * 101),
])  # fmt: skip
def test_rules_that_are_none(text: str) -> None:
    with pytest.raises(InvalidSpec, match=oidc.ROLES):
        parse_roles(text)


@pytest.mark.parametrize(("changes", "named"), [
    ({"issuer": ""}, oidc.ISSUER), ({"issuer": "", "audience": "", "roles": ""}, oidc.ISSUER),
    ({"audience": ""}, oidc.AUDIENCE), ({"audience": " , "}, oidc.AUDIENCE), ({"roles": ""}, oidc.ROLES),
    *(({"issuer": url}, oidc.ISSUER) for url in (
        "http://issuer.example", "issuer.example", "https://", "https://u:p@issuer.example", "https://issuer.example?x", "file:///x",
        "https://issuer.example#x", "https://[", "https://issuer.example:x", "https://issuer.example/a b", "http://127.0.0.1.evil.example",
    )),
])  # fmt: skip
def test_settings_that_are_not_whole_are_refused_by_name(changes: dict[str, str], named: str) -> None:
    whole = {"issuer": "https://issuer.example", "audience": AUDIENCE, "roles": "*=viewer", "name": "email"}
    assert OidcRules.of(**whole) is not None  # type: ignore[arg-type]
    with pytest.raises(InvalidSpec, match=named):
        OidcRules.of(**{**whole, **changes})  # type: ignore[arg-type]
    assert OidcRules.of(issuer="", audience="", roles="") is None


# ---------------------------------------------------------------- the issuer


async def test_a_key_that_is_new_is_fetched_and_one_that_is_gone_counts_no_more(issuer: Issuer) -> None:
    clock = Clock()
    tokens = issuer.tokens(clock=clock)
    old = issuer.token()
    await found(tokens, old)
    issuer.keys[:] = [rsa("next")]
    clock.now += REFETCH_S
    assert await found(tokens, issuer.token())
    assert "does not publish" in await refusal(tokens, old)


async def test_whatever_tokens_say_the_issuer_is_asked_once_in_an_interval(issuer: Issuer) -> None:
    clock = Clock()
    tokens = issuer.tokens(clock=clock)
    await found(tokens, issuer.token())
    clock.now += REFETCH_S

    async def ask(number: int) -> None:
        await refusal(tokens, issuer.token(header={"kid": f"strange-{number}"}))

    async with anyio.create_task_group() as tasks:
        for number in range(50):
            tasks.start_soon(ask, number)
    assert issuer.asked == [DISCOVERY, "/keys"] * 2
    assert await found(tokens, issuer.token())


async def test_an_issuer_that_is_down_at_the_start_is_found_later() -> None:
    clock = Clock()
    with reserve_port() as reserved:
        port = port_of(reserved)
        with issuing(rsa("k1"), port=port) as issuer:
            tokens, token = issuer.tokens(clock=clock), issuer.token()
        for _ in range(3):
            with pytest.raises(Unavailable, match="keys of the issuer"):
                await found(tokens, token)
        with issuing(rsa("k1"), port=port) as issuer:
            with pytest.raises(Unavailable, match="ask again"):
                await found(tokens, token)
            assert issuer.asked == [], "it was asked a moment ago"
            clock.now += RETRY_S
            assert await found(tokens, token)


async def test_keys_outlive_an_outage_by_a_day_and_not_more() -> None:
    clock = Clock()
    with issuing(rsa("k1")) as issuer:
        tokens, token, unknown = issuer.tokens(clock=clock), issuer.token(), issuer.token(header={"kid": "k9"})
        await found(tokens, token)
    clock.now += KEPT_S - 1
    assert await found(tokens, token)
    with pytest.raises(Unavailable):  # perhaps a new key: nobody can say
        await found(tokens, unknown)
    clock.now += 1
    with pytest.raises(Unavailable):
        await found(tokens, token)
    with pytest.raises(Unavailable):
        tokens.find(token, time.time())


async def test_keys_are_fetched_again_every_hour(issuer: Issuer) -> None:
    clock = Clock()
    tokens = issuer.tokens(clock=clock)
    asked: list[int] = []

    class Enough(Exception):
        pass

    async def sleep(seconds: float) -> None:
        asked.append(len(issuer.asked) // 2)
        clock.now += seconds
        if clock.now > 1000 + REFRESH_S:
            raise Enough

    with pytest.raises(Enough):
        await tokens.keys.keep(sleep)
    assert (asked[0], asked[-2], asked[-1]) == (1, 1, 2)


def _redirect(issuer: Issuer, path: str, to: str) -> Callable[[], None]:
    return lambda: issuer.answers.update({path: answering(302, Location=to)})


@pytest.mark.parametrize(("path", "answer", "says"), [
    ("/keys", answering(200, b'{"keys": [' + b" " * 10_000_000 + b"]}"), f"more than {DOCUMENT_BYTES_MAX} bytes"),
    (DISCOVERY, answering(200, b" " * 10_000_000), f"more than {DOCUMENT_BYTES_MAX} bytes"),
    ("/keys", answering(200, gzip.compress(b" " * 10_000_000), Content_Encoding="gzip"), "JSON"),
    ("/keys", answering(200, b'{"keys": []}'), "no key"), ("/keys", answering(200, b"[]"), "keys"),
    ("/keys", answering(200, b'{"keys": [{"kty": "RSA"}, {"kty": "RSA", "n": "AQ", "e": "AQAB"}, 7, null]}'), "no key"),
    ("/keys", answering(200, json.dumps({"keys": [{}] * 101}).encode()), "at most 100"),
    ("/keys", answering(200, b"[" * 100_000), "JSON"), ("/keys", answering(200, b"<html>"), "JSON"),
    ("/keys", answering(500), "answered 500"), (DISCOVERY, answering(404), "answered 404"),
    (DISCOVERY, answering(200, b'{"issuer": "https://evil.example", "jwks_uri": "https://evil.example/keys"}'), "same text"),
])  # fmt: skip
async def test_answers_of_an_issuer_that_are_not_used(issuer: Issuer, path: str, answer: Any, says: str) -> None:
    tokens = issuer.tokens()
    issuer.answers[path] = answer
    with pytest.raises(Unavailable, match=says):
        await found(tokens, issuer.token())


async def test_redirects_are_not_followed(issuer: Issuer) -> None:
    with issuing(rsa("k1")) as attacker:
        for path in ("/keys", DISCOVERY):
            issuer.answers = {path: answering(302, Location=f"{attacker.url}{path}")}
            with pytest.raises(Unavailable, match="redirects are not followed"):
                await found(issuer.tokens(), issuer.token())
        assert attacker.asked == []


@pytest.mark.parametrize("where", [
    None, "", 7, "http://10.0.0.1/keys", "http://evil.example/keys", "file:///etc/passwd", "ftp://127.0.0.1/keys",
    "//evil.example", "https://[",
])  # fmt: skip
async def test_keys_are_not_fetched_from_just_anywhere(issuer: Issuer, where: Any) -> None:
    document = {"issuer": issuer.url, "jwks_uri": where}
    issuer.answers[DISCOVERY] = answering(200, json.dumps(document).encode())
    with pytest.raises(Unavailable, match="names no https"):
        await found(issuer.tokens(), issuer.token())


async def test_an_issuer_that_answers_slowly_is_given_up(issuer: Issuer, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    over = threading.Event()
    issuer.answers["/keys"] = lambda handler: (over.wait(30), answering(200)(handler))[1]
    monkeypatch.setattr(oidc_keys, "FETCH_TIMEOUT_S", 0.3)
    try:
        with pytest.raises(Unavailable, match=r"did not answer within|ReadTimeout|keys:"):
            await found(issuer.tokens(), issuer.token())
    finally:
        over.set()


async def test_what_is_wrong_with_an_issuer_is_logged_once(issuer: Issuer) -> None:
    clock = Clock()
    tokens = issuer.tokens(clock=clock)
    issuer.answers["/keys"] = answering(500)
    with capture_logs() as logs:
        for _ in range(3):
            with pytest.raises(Unavailable):
                await found(tokens, issuer.token())
            clock.now += RETRY_S
        issuer.answers.clear()
        await found(tokens, issuer.token())
    assert [each["event"] for each in logs] == ["keys of the OIDC issuer not fetched", "keys of the OIDC issuer"]
    assert issuer.token() not in str(logs)


async def test_the_issuer_is_asked_by_tls_of_the_ca_that_is_named(tmp_path: Path) -> None:
    folder = certificates.make(tmp_path)
    with issuing(rsa("k1"), certificate=(folder / "ours.pem", folder / "ours.key")) as issuer:
        assert await found(issuer.tokens(ca=folder / "ours-ca.pem"), issuer.token())
        for ca in (None, folder / "foreign-ca.pem"):
            with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
                await found(issuer.tokens(ca=ca), issuer.token())
        with pytest.raises(InvalidSpec, match=oidc_keys.CA):
            issuer.tokens(ca=folder / "san").keys.require_usable()
        plain = {"issuer": issuer.url, "jwks_uri": issuer.url.replace("https:", "http:") + "/keys"}
        issuer.answers[DISCOVERY] = answering(200, json.dumps(plain).encode())
        with pytest.raises(Unavailable, match="names no https"):
            await found(issuer.tokens(ca=folder / "ours-ca.pem"), issuer.token())
