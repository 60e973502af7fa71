"""Hypothesis strategies that damage valid inputs: bytes, texts, JSON documents and pickles."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

# Large ones are few and repeated, so that an input stays below a megabyte.
LONG = 20_000
NUMBERS = (0, -1, 1, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**18, 10**30, 10**400)
FLOATS = (0.5, -0.0, 1e-300, 1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "", " ", "\0", "a\nb", "\ud800", "\u2028", "\u0663", "\u00b2", "NaN", "-1", "1e999", "../../etc", "/", "%00", "{",
    "ä" * 300, "9" * 5000, "0" * 5000 + "1", "a" * LONG, "0-999999999", "1-9:0", "*", "\x1b[31m", "__class__", "true", "null",
)  # fmt: skip


def _nested(depth: int, last: Any = 1) -> Any:
    for _ in range(depth):
        last = [last]
    return last


CONTAINERS: tuple[Any, ...] = (
    [],
    {},
    [[]],
    {"": {}},
    [0] * 2000,
    _nested(200),
    {"a": _nested(60)},
    {str(n): n for n in range(500)},
)

strange: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(TEXTS),
    st.sampled_from(NUMBERS),
    st.sampled_from(FLOATS),
    st.sampled_from(CONTAINERS),
    st.sampled_from((None, True, False)),
    st.text(max_size=20),
    st.integers(),
)


# ---------------------------------------------------------------- bytes and texts


def damaged(valid: st.SearchStrategy[bytes], *, often: bool = True) -> st.SearchStrategy[bytes]:
    """Valid bytes with up to four changes; sometimes none, sometimes random bytes. `often`: with runs of one byte."""
    pieces: Sequence[bytes] = (
        b"\0",
        b"\xff",
        b"\xff\xff\xff\xff",
        b"\x80",
        b"[",
        b"{",
        b'"',
        b"(",
        b",",
        b"9",
        b"-",
        b"\n",
        b";",
    )
    runs = (1, 2, 16, 600, LONG) if often else (1, 2, 16)

    def change(raw: bytes, kind: int, at: int, size: int, piece: bytes, count: int) -> bytes:
        at = at % (len(raw) + 1)
        match kind:
            case 0:  # overwrite
                return raw[:at] + piece + raw[at + len(piece) :]
            case 1:  # cut off
                return raw[:at]
            case 2:  # delete
                return raw[:at] + raw[at + size :]
            case 3:  # repeat a part
                return raw[: at + size] + raw[at : at + size] * min(count, 2 * LONG // (size + 1)) + raw[at + size :]
            case _:  # insert
                return raw[:at] + piece * count + raw[at:]

    step = st.tuples(
        st.integers(0, 4),
        st.integers(0, 1 << 16),
        st.integers(1, 64),
        st.one_of(st.sampled_from(pieces), st.binary(min_size=1, max_size=4)),
        st.sampled_from(runs),
    )

    def apply(pair: tuple[bytes, list[tuple[int, int, int, bytes, int]]]) -> bytes:
        raw, steps = pair
        for kind, at, size, piece, count in steps:
            raw = change(raw, kind, at, size, piece, count)
        return raw

    changed = st.tuples(valid, st.lists(step, max_size=4)).map(apply)
    return st.one_of(changed, changed, changed, st.binary(max_size=64))


def texts(*valid: str) -> st.SearchStrategy[str]:
    """Valid texts with numbers replaced, parts repeated, and characters that are digits to Python and to nobody else."""
    tokens = st.one_of(st.sampled_from(TEXTS), st.text(max_size=8), st.integers().map(str))

    def change(text: str, kind: int, at: int, size: int, token: str, count: int) -> str:
        at = at % (len(text) + 1)
        match kind:
            case 0:
                return text[:at] + token + text[at + size :]
            case 1:
                return text[:at] + text[at + size :]
            case 2:
                return text[: at + size] + text[at : at + size] * min(count, 2 * LONG // (size + 1)) + text[at + size :]
            case 3:
                digits = next((place for place in range(at, len(text)) if text[place].isdigit()), None)
                return text if digits is None else text[:digits] + token + text[digits + 1 :]
            case _:
                return text[:at] + token + text[at:]

    step = st.tuples(
        st.integers(0, 4), st.integers(0, 4096), st.integers(1, 12), tokens, st.sampled_from((1, 3, 40, LONG))
    )

    def apply(pair: tuple[str, list[tuple[int, int, int, str, int]]]) -> str:
        text, steps = pair
        for kind, at, size, token, count in steps:
            text = change(text, kind, at, size, token, count)
        return text[: 8 * LONG]

    changed = st.tuples(st.sampled_from(valid), st.lists(step, max_size=3)).map(apply)
    return st.one_of(changed, changed, changed, st.text(max_size=40))


def written(valid: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Texts that a file can hold: no halves of surrogate pairs."""
    return valid.map(lambda text: text.encode(errors="replace").decode())


# ---------------------------------------------------------------- JSON


def documents(*valid: Any) -> st.SearchStrategy[Any]:
    """Valid documents with up to three values replaced, left out, doubled or added."""
    edit = st.tuples(st.integers(0, 1 << 16), st.integers(0, 5), strange)

    def apply(pair: tuple[Any, list[tuple[int, int, Any]]]) -> Any:
        document, edits = pair
        for number, kind, value in edits:
            places = list(_places(document))
            document = _edited(document, places[number % len(places)], kind, value)
        return document

    changed = st.tuples(st.sampled_from(valid), st.lists(edit, max_size=3)).map(apply)
    return st.one_of(changed, changed, changed, changed, strange)


def json_texts(*valid: Any) -> st.SearchStrategy[bytes]:
    """The same as text, sometimes damaged as text."""
    whole = documents(*valid).map(dumped)
    return st.one_of(
        whole,
        whole,
        damaged(whole),
        st.sampled_from((b"[" * 100_000, b'{"a":' * 50_000, b"", b"null", b"\xef\xbb\xbf{}")),
    )


def dumped(document: Any) -> bytes:
    return json.dumps(document).encode()


def _places(document: Any, above: tuple[Any, ...] = ()) -> Any:
    yield above
    if len(above) < 8:
        inner = (
            document.items()
            if isinstance(document, dict)
            else enumerate(document)
            if isinstance(document, list)
            else ()
        )
        for key, value in list(inner)[:40]:
            yield from _places(value, (*above, key))


def _edited(document: Any, place: tuple[Any, ...], kind: int, value: Any) -> Any:
    if not place:
        if kind == 0:
            return value
        if isinstance(document, dict):
            return {**document, "added": value}
        return [*document, value] if isinstance(document, list) else value
    key, *rest = place
    copied = dict(document) if isinstance(document, dict) else list(document)
    if rest or kind < 3:
        copied[key] = _edited(copied[key], tuple(rest), kind, value) if rest else value
    elif kind == 3:
        del copied[key]
    elif isinstance(copied, list):
        copied += [copied[key]] * 3
    else:
        copied[str(value)[:LONG]] = copied[key]
    return copied


# ---------------------------------------------------------------- pickles


def pickles(*valid: bytes) -> st.SearchStrategy[bytes]:
    """Valid pickles that are damaged, and programs of opcodes that no pickler writes."""
    small = st.integers(0, 255)
    index = st.sampled_from((0, 1, 2, 255, 1 << 16, 1 << 23, 1 << 24, 1 << 25, 1 << 26, (1 << 32) - 1))

    def packed(code: bytes, size: int) -> Callable[[int], bytes]:
        return lambda number: code + number.to_bytes(8, "little")[:size]

    text = st.text(max_size=6).map(lambda each: each.encode(errors="replace"))
    numbers = st.sampled_from([number for number in NUMBERS if abs(number) < 2**63])
    plain = st.sampled_from(
        [b"N", b"\x88", b"\x89", b"]", b"}", b")", b"(", b"\x8f", b"l", b"d", b"t", b"0", b"1", b"2"]
    )
    join = st.sampled_from(
        [
            b"a",
            b"e",
            b"s",
            b"u",
            b"\x85",
            b"\x86",
            b"\x87",
            b"\x90",
            b"\x91",
            b"\x94",
            b"b",
            b"R",
            b"\x81",
            b"\x93",
            b"2\x86",
        ]
    )
    opcode = st.one_of(
        plain,
        join,
        numbers.map(lambda number: pickle.dumps(number, 2)[2:-1]),
        small.map(packed(b"K", 1)),
        index.map(packed(b"r", 4)),
        index.map(packed(b"j", 4)),
        small.map(packed(b"q", 1)),
        small.map(packed(b"h", 1)),
        text.map(lambda each: b"X" + len(each).to_bytes(4, "little") + each),
        st.tuples(index, text).map(lambda pair: b"B" + pair[0].to_bytes(8, "little")[:4] + pair[1]),
        st.tuples(index, text).map(lambda pair: b"\x8e" + pair[0].to_bytes(8, "little") + pair[1]),
        st.tuples(index, text).map(lambda pair: b"\x95" + pair[0].to_bytes(8, "little") + pair[1]),
        st.sampled_from(
            [
                b"cos\nsystem\n",
                b"cbuiltins\ndict\n",
                b"(i__main__\nx\n",
                b"P1\n",
                b"\x80\x05",
                b"L" + b"9" * 5000 + b"L\n",
            ]
        ),
    )
    program = st.lists(opcode, max_size=24).map(lambda codes: b"\x80\x04" + b"".join(codes) + b".")
    # A tuple of the last value twice, again and again: 40 bytes whose hash takes 2**40 steps.
    doubled = st.sampled_from((12, 31)).map(lambda times: b")" + b"2\x86" * times)
    bombs = doubled.map(lambda value: b"\x80\x04\x8f(" + value + b"\x90.")
    keyed = doubled.map(lambda value: b"\x80\x04}" + value + b"Ns.")
    deep = st.sampled_from((b"]" * LONG + b"a" * (LONG - 1) + b".", b")" + b"\x85" * LONG + b".", b"(" * LONG + b"."))
    known = st.sampled_from(valid) if valid else st.just(b"N.")
    return st.one_of(damaged(known, often=False), damaged(known), program, program, bombs, keyed, deep)
