"""Whatever a provider does is an answer, and settings that mean nothing are refused when the supervisor starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import anyio
import plugged as packages
import pytest

from holdfast.domain.errors import InvalidSpec, PluginError, Unavailable
from holdfast.supervisor import providers
from holdfast.supervisor.protocol import RequestReplacement
from holdfast.supervisor.providers import Machine, Provider, asking
from holdfast.supervisor.providers.command import Command

pytestmark = pytest.mark.anyio

WANTED = RequestReplacement("n3", "n3-1000-1", "gpu-3", "10.0.0.3", "Xid 79 on GPU 3; $(rm -rf /)")
TICKET = {"holdfast.providers": {"ticket": "acme_ticket:build"}}


def command(body: str) -> str:
    return f'{sys.executable} -c "{body}" {{node}} {{hostname}} {{address}} {{reason}} {{request}}'


async def test_the_command_gets_each_word_as_it_is(tmp_path: Path) -> None:
    said = await Command(command("import json, sys; print(json.dumps(sys.argv[1:]))")).replace(
        Machine("n3", "gpu-3", "10.0.0.3", WANTED.reason, WANTED.request)
    )
    assert json.loads(said) == ["n3", "gpu-3", "10.0.0.3", WANTED.reason, WANTED.request]


async def test_a_command_that_fails_or_hangs_is_a_refusal_with_its_words() -> None:
    failing = Command(command("import sys; print('no capacity in zone b'); sys.exit(3)"))
    ok, reason = await asking.ask(failing, WANTED)
    assert not ok
    assert "exit code 3: no capacity in zone b" in reason
    with pytest.raises(Unavailable, match=r"did not end within 0\.2 s"):
        await Command(command("import time; time.sleep(60)"), 0.2).replace(Machine("n", "h", "a", "r", "q"))


class Does:
    def __init__(self, outcome: object) -> None:
        self.outcome = outcome

    async def replace(self, machine: Machine) -> str:
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("provider", "answer"),
    [
        (Does("ticket 7"), (True, "ticket 7")),
        (Does(None), (True, "")),
        (Does("  two\nlines "), (True, "two lines")),
        (Does(ValueError("quota")), (False, "ValueError: quota")),
        (Does(Unavailable("no answer from the cloud")), (False, "no answer from the cloud")),
        (None, (False, "this supervisor has no HOLDFAST_PROVIDER, though the leader before it had")),
    ],
)
async def test_whatever_a_provider_does_is_an_answer(provider: Provider | None, answer: tuple[bool, str]) -> None:
    assert await asking.ask(provider, WANTED) == answer


async def test_a_provider_that_never_answers_does_not_keep_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    class Silent:
        async def replace(self, machine: Machine) -> str:
            await anyio.sleep_forever()
            raise AssertionError

    monkeypatch.setattr(asking, "LIMIT_S", 0.05)
    ok, reason = await asking.ask(Silent(), WANTED)
    assert not ok
    assert "has not answered" in reason


@pytest.mark.parametrize(
    ("provider", "line", "wrong"),
    [
        ("ticket", "true", "HOLDFAST_PROVIDER"),
        ("command", "", "HOLDFAST_REPLACE_COMMAND"),
        ("", "no-such-program-anywhere {node}", "HOLDFAST_REPLACE_COMMAND"),
        ("", "echo 'never closed", "HOLDFAST_REPLACE_COMMAND"),
        ("ticket", "", "HOLDFAST_PROVIDER"),  # not installed
    ],
)
def test_settings_that_mean_nothing_are_refused(provider: str, line: str, wrong: str) -> None:
    with pytest.raises(InvalidSpec, match=wrong):
        providers.build(provider, line)


def test_nobody_is_asked_by_default() -> None:
    assert providers.build("", "") is None
    assert providers.name_of("", "true") == providers.COMMAND


def test_a_plug_in_is_a_provider_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = "class P:\n    async def replace(self, machine): return 'done'\nbuild = P\n"
    packages.pretend(tmp_path, "acme", TICKET, {"acme_ticket": module})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(providers.build("ticket", ""), Provider)


def test_a_plug_in_without_the_method_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"holdfast.providers": {"bad": "acme_bad:build"}}
    packages.pretend(tmp_path, "acme", entries, {"acme_bad": "build = dict\n"})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PluginError, match="no method `replace`"):
        providers.build("bad", "")
