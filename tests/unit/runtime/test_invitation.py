"""The text of an invitation, and the files of a node that has joined."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from holdfast.domain.errors import HoldfastError, InvalidSpec
from holdfast.runtime.trust.authority import Authority
from holdfast.runtime.trust.enrolled import Enrolled, Joined
from holdfast.runtime.trust.identities import Identity, Role
from holdfast.runtime.trust.invitation import PREFIX, Invitation, fingerprint, new_request, requested_key

GOOD = Invitation("main", ("https://head-1:8470",), "ab" * 32, ("head-1:8471",), "node-7", "a-secret-token")
NODE_7 = Identity("main", Role.AGENT, "node-7")


def coded(**changes: object) -> str:
    values = {"fleet": "main", "apis": ["https://h"], "ca": "", "control": ["h:1"], "node": "", "token": "t", **changes}
    return PREFIX + base64.urlsafe_b64encode(json.dumps(values).encode()).decode()


def test_it_is_one_word_and_comes_back_as_it_was() -> None:
    assert Invitation.read(GOOD.text) == GOOD
    assert not set(GOOD.text) & set(" \t\n'\"\\$=")


@pytest.mark.parametrize("text", [
    "", "hello", PREFIX, GOOD.text[:-9], PREFIX + "!" * 40, PREFIX + "A" * 5000, coded(apis=["http://h"]), coded(apis=[]),
    coded(control=[]), coded(fleet="a b"), coded(apis=5), PREFIX + base64.urlsafe_b64encode(b"[1]").decode(),
], ids=range(12))  # fmt: skip
def test_what_is_none_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(InvalidSpec) as refusal:
        Invitation.read(text)
    assert not text.removeprefix(PREFIX)[:40] or text.removeprefix(PREFIX)[:40] not in str(refusal.value)


def signed(authority: Authority, folder: Path) -> dict[str, bytes]:
    from datetime import timedelta

    key, csr = new_request(NODE_7)
    certificate, _ = authority.sign_agent(requested_key(csr, NODE_7), NODE_7, timedelta(days=1))
    return {"certificate": certificate, "key": key, "ca": authority.certificate}


def test_a_replacement_is_whole_and_keeps_what_a_process_may_be_reading(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca", "main", 10)
    enrolled, joined = Enrolled(tmp_path / "identity"), Joined("main", "node-7", ("h:1",))
    assert Enrolled(tmp_path / "identity").joined is None
    first = signed(authority, tmp_path)
    enrolled.join(joined, **first, join_token="")
    assert enrolled.joined == joined
    assert enrolled.files.join_token is None
    before = enrolled.files.cert.resolve()
    for _ in range(3):
        made = signed(authority, tmp_path)
        enrolled.replace(**made)
        assert (enrolled.files.cert.read_bytes(), enrolled.files.key.read_bytes()) == (made["certificate"], made["key"])
    assert not before.exists(), "only the last two are kept"
    assert len([each for each in enrolled.path.iterdir() if each.is_dir() and not each.is_symlink()]) == 2
    with pytest.raises(InvalidSpec, match="the certificate of the key"):
        enrolled.replace(certificate=first["certificate"], key=made["key"], ca=first["ca"])
    assert enrolled.files.cert.read_bytes() == made["certificate"]


def test_a_join_that_was_cut_off_is_no_join(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca", "main", 10)
    enrolled = Enrolled(tmp_path / "identity")
    enrolled.path.mkdir()
    enrolled.replace(**signed(authority, tmp_path))
    assert enrolled.joined is None
    (enrolled.path / "fleet.json").write_text("{")
    with pytest.raises(HoldfastError, match="join again"):
        _ = enrolled.joined


def test_the_fingerprint_is_of_the_certificates_not_of_the_text_around_them(tmp_path: Path) -> None:
    one, other = (Authority.create(tmp_path / name, "main", 10).certificate for name in "ab")
    assert fingerprint(b"a comment\n" + one) == fingerprint(one)
    assert len({fingerprint(one), fingerprint(other), fingerprint(one + other)}) == 3
    with pytest.raises(ValueError, match="PEM"):
        fingerprint(b"nothing")
