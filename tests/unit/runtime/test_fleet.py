"""Which fleet admits whom: names, join tokens, their rotation, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.domain.errors import InvalidSpec, InvalidSpecs, OtherFleet
from holdfast.runtime.settings import ServiceSettings, read_settings
from holdfast.runtime.trust.fleet import NUMBER, PROOF, TOKENS_MAX, Membership, read_tokens

ONE, TWO, THREE = "first-token-of-this-fleet", "second-token-of-this-fleet", "token-of-other-people"


def meet(agent: Membership, service: Membership) -> None:
    """Raises `OtherFleet` if either refuses the other."""
    introduction = agent.introduce()
    introduction.check(service.admit(dict(introduction.metadata)))


@pytest.mark.parametrize(
    ("agent", "service"),
    [
        (Membership(), Membership("main")),
        (Membership("main"), Membership("main")),
        (Membership(tokens=(ONE,)), Membership("main", (ONE,))),
        (Membership("main", (ONE,)), Membership("main", (ONE,))),
        (Membership("main", (TWO,)), Membership("main", (ONE, TWO))),
        (Membership("main", (TWO, ONE)), Membership("main", (ONE, TWO))),
        (Membership("main"), Membership("main", (ONE,), optional=True)),
        (Membership("main", (ONE,), optional=True), Membership("main")),
    ],
)
def test_those_of_one_fleet_meet(agent: Membership, service: Membership) -> None:
    meet(agent, service)


@pytest.mark.parametrize(
    ("agent", "service", "reason"),
    [
        (Membership("mine"), Membership("main"), "this is fleet 'main', not 'mine'"),
        (Membership("mine", (ONE,)), Membership("main", (ONE,)), "this is fleet 'main', not 'mine'"),
        (Membership("main"), Membership("main", (ONE,)), "has a join token: set HOLDFAST_JOIN_TOKEN_FILE"),
        (
            Membership("main", (THREE,)),
            Membership("main", (ONE, TWO)),
            "the agent's join token is not the one of fleet",
        ),
        (Membership("main", (THREE,)), Membership("main", (ONE,), optional=True), "the agent's join token is not"),
        (Membership("main", (ONE,)), Membership("main"), "does not prove that it is of fleet 'main'"),
        (Membership("main", (TWO, ONE)), Membership("main", (ONE,)), "the agent's join token is not"),
    ],
)
def test_those_of_two_fleets_do_not(agent: Membership, service: Membership, reason: str) -> None:
    with pytest.raises(OtherFleet, match=reason):
        meet(agent, service)


def test_a_service_that_only_repeats_what_it_hears_is_refused() -> None:
    introduction = Membership("main", (ONE,)).introduce()
    heard = dict(introduction.metadata)
    for answer in (heard, {PROOF: heard[PROOF]}, {"holdfast-fleet": "main", PROOF: "0" * 64}, {}):
        with pytest.raises(OtherFleet):
            introduction.check(answer)


def test_an_answer_to_another_call_is_no_proof() -> None:
    agent, service = Membership("main", (ONE,)), Membership("main", (ONE,))
    answer = service.admit(dict(agent.introduce().metadata))
    with pytest.raises(OtherFleet, match="join token"):
        agent.introduce().check(answer)


def test_an_introduction_belongs_to_its_fleet_and_number() -> None:
    service = Membership("main", (ONE,))
    said = dict(Membership("main", (ONE,)).introduce().metadata)
    for changed in ({NUMBER: "0"}, {NUMBER: "9" * 100_000}, {PROOF: "é"}, {"holdfast-fleet": ""}, {PROOF: ""}):
        with pytest.raises(OtherFleet):
            service.admit(said | changed)


def test_a_malformed_name_is_not_repeated() -> None:
    with pytest.raises(OtherFleet, match="not a malformed name"):
        Membership("main").admit({"holdfast-fleet": "\x1b[2J" * 1000})


def test_a_file_has_a_token_in_a_line(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{ONE}\n\n  {TWO}\n{ONE}\n")
    assert read_tokens("", file) == (ONE, TWO)
    assert read_tokens(ONE, None) == (ONE,)
    assert read_tokens("", None) == ()


@pytest.mark.parametrize(
    ("text", "content", "reason"),
    [
        ("short", None, "a token of 5 characters; expected 16 to 512|16 to 512 visible ASCII"),
        ("with a space in the middle", None, "visible ASCII"),
        (ONE, ONE, "not both"),
        ("", "", "it is empty"),
        ("", "\xff\xfe", "not text"),
        ("", "\n".join(f"{ONE}-{number}" for number in range(TOKENS_MAX + 1)), "at most 8"),
        ("", "missing", "No such file"),
    ],
)
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, text: str, content: str | None, reason: str) -> None:
    file = tmp_path / "tokens"
    if content is not None and content != "missing":
        file.write_bytes(content.encode("latin-1"))
    with pytest.raises(InvalidSpec, match=reason) as refused:
        read_tokens(text, None if content is None else file)
    assert not text or text not in str(refused.value)


def test_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_FLEET", "main")
    monkeypatch.setenv("HOLDFAST_JOIN_TOKEN", ONE)
    monkeypatch.setenv("HOLDFAST_JOIN_OPTIONAL", "true")
    settings = read_settings(ServiceSettings)
    assert settings.membership == Membership("main", (ONE,), optional=True)
    assert ONE not in repr(settings) + repr(settings.membership) + repr(settings.membership.introduce())
    monkeypatch.setenv("HOLDFAST_FLEET", "not a name")
    with pytest.raises(InvalidSpecs, match="HOLDFAST_FLEET"):
        read_settings(ServiceSettings)
