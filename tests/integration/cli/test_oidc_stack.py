"""`holdfast up` whose API knows an OIDC issuer: commands pass its tokens, and an issuer that is down opens nothing."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from commands import Shell, read_until
from oidc_issuer import AUDIENCE, ROLES, issuing, rsa
from ports import port_of, reserve_port
from waiting import TIMEOUT_S, wait_until

PORTS = ("--port", "0", "--control-port", "0", "--diagnostics-port", "0")


def test_commands_use_tokens_of_an_issuer_that_was_down_at_the_start(tmp_path: Path) -> None:
    reserved = reserve_port()
    port = port_of(reserved)
    file = tmp_path / "token"
    environment = {
        "HOLDFAST_API_OIDC_ISSUER": f"http://127.0.0.1:{port}",
        "HOLDFAST_API_OIDC_AUDIENCE": AUDIENCE,
        "HOLDFAST_API_OIDC_ROLES": ROLES,
        "HOLDFAST_API_TOKEN_FILE": str(file),
    }
    shell = Shell(tmp_path, environment)
    with reserved, shell.start("up", "--dir", "up", "--nodes", "0", *PORTS) as process:
        said = ""
        while "Ctrl-C stops everything" not in said:
            said += read_until(process, r".").string
        api = json.loads((tmp_path / "up" / "stack.json").read_text())["endpoints"]["supervisor"]["api"]
        assert not (tmp_path / "up" / "api-token").exists(), "the issuer's tokens are those of this API"
        with issuing(rsa("k1"), port=port) as issuer:
            token = issuer.token(groups=["researchers"])
            headers = {"Authorization": f"Bearer {token}"}
            assert httpx.get(f"{api}/v1/jobs").status_code == 401
            wait_until(
                lambda: httpx.get(f"{api}/v1/jobs", headers=headers).status_code == 200,
                description="the keys of the issuer",
            )  # fmt: skip
            file.write_text(token)
            ada = Shell(tmp_path, {**environment, "HOLDFAST_API": api}, mark=shell.mark)
            listed = ada("jobs", "list")
            assert listed.code == 0, listed.err
            denied = ada("breaker", "reset")
            said = " ".join(denied.err.replace("│", " ").split())
            assert (denied.code != 0, "oidc:ada has role submitter" in said) == (True, True), said
            file.write_text(issuer.token(exp=1))
            expired = ada("jobs", "list")
            assert "has expired" in " ".join(expired.err.replace("│", " ").split()), expired.err
        process.terminate()
        process.wait(TIMEOUT_S)
    shell.assert_nothing_runs()
