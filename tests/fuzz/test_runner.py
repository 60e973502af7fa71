"""The runner finds what is planted, makes it small, and does the same again for the same seed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from fuzz import rest_targets
from fuzz.bounds import TooLarge, TooSlow
from fuzz.mutations import damaged, documents, json_texts, pickles, texts
from fuzz.rest_world import world
from fuzz.runner import attempt, run_batch, shown
from fuzz.target import Target
from hypothesis import strategies as st

from holdfast.runtime.trust.api_tokens import ApiRole
from holdfast.supervisor.api import access
from holdfast.supervisor.api.access import ROUTES, RouteRule


def target(read: Callable[[Any], object], inputs: st.SearchStrategy[Any] | None = None, **more: Any) -> Target:
    return Target("planted", lambda: inputs if inputs is not None else st.text(), read, **more)


def fail_on_long(text: str) -> None:
    if len(text) >= 3:
        raise KeyError(text)


def spin(text: str) -> None:
    while len(text) >= 3:
        pass


def hoard(text: str) -> None:
    if len(text) >= 3:
        bytearray(64 << 20).replace(b"\0", b"x")


def swallow(text: str) -> None:
    """Handlers of the code that is tested do not catch the end of its time."""
    try:
        spin(text)
    except Exception:
        return


def test_an_exception_that_is_not_allowed_is_found_and_made_small() -> None:
    (find,) = run_batch(target(fail_on_long), 1).finds
    assert find.error.startswith("KeyError at test_runner.py:")
    assert find.example == "'000'"
    assert find.command == "make fuzz ARGS='--only \"planted\" --batch 1'"


def test_an_exception_that_is_allowed_is_none() -> None:
    assert run_batch(target(fail_on_long, allowed=(KeyError,)), 1).finds == ()


def test_each_kind_of_failure_is_a_find() -> None:
    def read(number: int) -> None:
        raise KeyError if number % 2 else ValueError

    kinds = {find.error.partition(" ")[0] for find in run_batch(target(read, st.integers(0, 99)), 1).finds}
    assert kinds == {"ValueError", "KeyError"}


@pytest.mark.parametrize("read", [spin, swallow])
def test_an_input_that_takes_too_long_is_found(read: Callable[[str], None]) -> None:
    with pytest.raises(TooSlow):
        attempt(target(read, cpu_s_max=0.05), "abc")
    attempt(target(read, cpu_s_max=0.05), "ab")


def test_an_input_that_takes_too_much_memory_is_found() -> None:
    with pytest.raises(TooLarge, match="more than 32 MiB"):
        attempt(target(hoard, growth_bytes_max=32 << 20), "abc")
    attempt(target(hoard, growth_bytes_max=32 << 20), "ab")


def test_a_seed_repeats_a_batch() -> None:
    def inputs(seed: int) -> list[bytes]:
        seen: list[bytes] = []
        strategies = (json_texts({"a": 1}), damaged(st.just(b"abc")), texts("10s").map(str.encode), pickles())
        run_batch(target(seen.append, st.one_of(strategies)), seed, 60)
        return seen

    assert inputs(5) == inputs(5)
    assert inputs(5) != inputs(6)


def test_documents_change_values_deep_inside() -> None:
    valid = {"a": {"b": [1, {"c": 2}]}, "d": "x"}
    changed: list[Any] = []
    run_batch(target(changed.append, documents(valid)), 3, 300)
    dicts = [each for each in changed if isinstance(each, dict)]
    assert valid in changed
    assert any(each.get("d") == "x" and each["a"] != valid["a"] for each in dicts if "a" in each)
    assert valid == {"a": {"b": [1, {"c": 2}]}, "d": "x"}, "the example itself is never changed"


def test_long_inputs_are_shown_short() -> None:
    assert shown("a" + "[" * 1000) == "'a[…1000 times…'"


# ---------------------------------------------------------------- the REST targets


def run_route(route: str) -> list[str]:
    (found,) = [each for each in rest_targets.TARGETS if each.name == f"REST {route}"]
    return [find.error for find in run_batch(found, 11, 400).finds]


def test_a_route_that_anybody_may_use_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "ROUTES", {**ROUTES, "POST /v1/breaker/reset": RouteRule(ApiRole.VIEWER)})
    monkeypatch.setattr(access.refused, "__defaults__", (access.ROUTES,))
    assert any("is in the inbox" in error for error in run_route("POST /v1/breaker/reset"))


def test_an_answer_that_the_document_does_not_describe_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(json.dumps(world().app.openapi()))
    document["components"]["schemas"]["Breaker"]["properties"]["state"] = {"type": "integer"}
    monkeypatch.setattr(world().app, "openapi", lambda: document)
    rest_targets._validator.cache_clear()
    try:
        assert any(error.startswith("ValidationError") for error in run_route("GET /v1/breaker"))
    finally:
        rest_targets._validator.cache_clear()


def test_an_internal_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: Any, **__: Any) -> None:
        raise KeyError("broken")

    monkeypatch.setattr(world().backend.history, "incident", broken)
    assert any("answered 500" in error for error in run_route("GET /v1/incidents/{incident_id}"))
