"""Messages of `RankMonitorClient` (nvidia-resiliency-ext, `fault_tolerance/data.py` and `utils.py`), and the agent's answers.

Each message consists of a length of four bytes, most significant first, and a pickle. A pickle can run any code, so none is
loaded unchecked. The opcodes are read first, and only those of plain values and objects are accepted. The only accepted classes
are those of `_KINDS`, which are replaced by classes of this module. The answers are written opcode by opcode, so the agent does
not need that package.

The client's version is derived from its messages: `InitMsg` has an `iteration` since 0.6. Clients of 0.6 and later do not read
the answers to heartbeats and sections unless the configuration requests it. The agent's configuration does."""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from holdfast.domain.errors import MalformedMessage

HEAD_BYTES: Final = 4
MESSAGE_BYTES_MAX: Final = 64 << 10
OPCODES_MAX: Final = 4096
SECTIONS_MAX: Final = 256
NAME_CHARS_MAX: Final = 200

_DATA: Final = "nvidia_resiliency_ext.fault_tolerance.data"
_CONFIG: Final = "nvidia_resiliency_ext.fault_tolerance.config"
# Only tuples of one element and no FROZENSET, so that hashing a nested value takes linear time.
_OPCODES: Final = frozenset(
    {
        *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
        *("SHORT_BINBYTES", "BINBYTES", "SHORT_BINUNICODE", "BINUNICODE"),
        *("EMPTY_DICT", "SETITEM", "SETITEMS", "EMPTY_SET", "ADDITEMS", "EMPTY_LIST", "APPEND", "APPENDS"),
        *("EMPTY_TUPLE", "TUPLE1", "NEWOBJ", "BUILD", "REDUCE", "STACK_GLOBAL", "GLOBAL"),
        *("MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    }
)
_MEMO: Final = frozenset({"BINPUT", "LONG_BINPUT"})


@dataclass(frozen=True, slots=True)
class Authkey:
    """The first message of a connection. Its key is for objects of multiprocessing, which are refused."""


@dataclass(frozen=True, slots=True)
class Init:
    rank: int
    pid: int
    version: str  # version range of the client, derived from its messages


@dataclass(frozen=True, slots=True)
class Heartbeat:
    pass


@dataclass(frozen=True, slots=True)
class Section:
    action: str  # "open", "close" or "close_all"
    name: str


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts in seconds; None = not used. `sections`: by name."""

    initial: float | None = None
    subsequent: float | None = None
    sections: Mapping[str, float | None] = field(default_factory=dict)
    out_of_section: float | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """Timeouts that the script has calculated. None = unchanged."""

    heartbeat: tuple[float | None, float | None] | None
    sections: tuple[Mapping[str, float | None], float | None] | None


Message = Authkey | Init | Heartbeat | Section | Update


class _Stand:
    """Replaces a class of the package; an instance has the attributes of the pickled object."""


class _AuthkeyMsg(_Stand):
    pass


class _InitMsg(_Stand):
    pass


class _RankInfo(_Stand):
    pass


class _HeartbeatMsg(_Stand):
    pass


class _SectionMsg(_Stand):
    pass


class _UpdateConfigMsg(_Stand):
    pass


class _HeartbeatTimeouts(_Stand):
    pass


class _SectionTimeouts(_Stand):
    pass


def _section_action(value: object) -> str:
    actions = {1: "open", 2: "close", 3: "close_all"}
    if type(value) is not int or value not in actions:
        raise MalformedMessage("action", f"{value!r} is not an action")
    return actions[value]


_KINDS: Final[Mapping[str, Any]] = {
    "AuthkeyMsg": _AuthkeyMsg,
    "InitMsg": _InitMsg,
    "RankInfo": _RankInfo,
    "HeartbeatMsg": _HeartbeatMsg,
    "SectionMsg": _SectionMsg,
    "SectionAction": _section_action,
    "UpdateConfigMsg": _UpdateConfigMsg,
    "HeartbeatTimeouts": _HeartbeatTimeouts,
    "SectionTimeouts": _SectionTimeouts,
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module != _DATA or name not in _KINDS:
            raise MalformedMessage("pickle", f"names {module}.{name}, which is not a message of this protocol")
        return _KINDS[name]

    def persistent_load(self, pid: Any) -> Any:
        raise MalformedMessage("pickle", "refers to an external object")


def decode(raw: bytes) -> Message:
    """Decode one pickle. Raises `MalformedMessage` if it is not a message of this protocol."""
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(raw)):
            if opcode.name not in _OPCODES or count >= OPCODES_MAX:
                raise MalformedMessage("pickle", f"has the opcode {opcode.name} at {count}, which is not accepted")
            # The unpickler allocates its memo up to the largest number; picklers number from 0 on without gaps.
            if opcode.name in _MEMO and not (isinstance(argument, int) and 0 <= argument <= count):
                raise MalformedMessage("pickle", f"has {opcode.name} {argument} at {count}, which is not accepted")
        return _message(_Reader(io.BytesIO(raw)).load())
    except MalformedMessage:
        raise
    except Exception as error:  # a malformed pickle can raise any exception
        raise MalformedMessage("pickle", f"{len(raw)} bytes that are not a pickle ({type(error).__name__})") from None


def _message(loaded: object) -> Message:
    match loaded:
        case _AuthkeyMsg():
            return Authkey()
        case _InitMsg():
            info = getattr(loaded, "rank_info", None)
            rank = getattr(info, "global_rank", None)
            if isinstance(rank, str) and rank.isdecimal():  # 0.4 sends the environment's RANK as a string
                rank = int(rank)
            pid = getattr(info, "pid", None)
            if type(rank) is not int or type(pid) is not int:
                raise MalformedMessage("rank_info", "a rank and a pid are missing")
            return Init(rank, pid, "0.6 or later" if hasattr(loaded, "iteration") else "0.4 or 0.5")
        case _HeartbeatMsg():
            return Heartbeat()
        case _SectionMsg():
            action = getattr(loaded, "action", None)
            name = getattr(loaded, "section", None)
            if not isinstance(action, str) or (action != "close_all" and not _is_name(name)):
                raise MalformedMessage("section", "an action and a name are missing")
            return Section(action, name if isinstance(name, str) else "")
        case _UpdateConfigMsg():
            beats, sections = getattr(loaded, "hb_timeouts", None), getattr(loaded, "section_timeouts", None)
            return Update(
                None if beats is None else (_seconds(beats, "initial"), _seconds(beats, "subsequent")),
                None if sections is None else (_sections(sections), _seconds(sections, "out_of_section")),
            )
    raise MalformedMessage("pickle", "is not a message of this protocol")


def _seconds(timeouts: object, name: str) -> float | None:
    return _limit(getattr(timeouts, name, None), name)


def _limit(value: object, name: str) -> float | None:
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 < value < math.inf:  # type: ignore[operator]
        raise MalformedMessage(name, "is not a positive number of seconds")
    return float(value)  # type: ignore[arg-type]


def _sections(timeouts: object) -> dict[str, float | None]:
    given = getattr(timeouts, "section", None)
    if not isinstance(given, dict) or len(given) > SECTIONS_MAX or not all(map(_is_name, given)):
        raise MalformedMessage("section", "is not a table of sections")
    return {name: _limit(value, f"section {name}") for name, value in given.items()}


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= NAME_CHARS_MAX


# ---------------------------------------------------------------- answers

_PLAIN_BEGIN, _PLAIN_END = 2, -1  # a pickle of protocol 2 without its header and STOP


def ok() -> bytes:
    return _framed(_object(_DATA, "OkMsg", _plain({})))


def ok_with_config(timeouts: Timeouts, safety_factor: float) -> bytes:
    """Return the answer to `Init`: the client's configuration. For missing values the client uses its own defaults."""
    config = _object(
        _CONFIG,
        "FaultToleranceConfig",
        _plain(
            {
                "initial_rank_heartbeat_timeout": timeouts.initial,
                "rank_heartbeat_timeout": timeouts.subsequent,
                "rank_section_timeouts": dict(timeouts.sections),
                "rank_out_of_section_timeout": timeouts.out_of_section,
                "safety_factor": safety_factor,
                "skip_section_response": False,
                "install_exception_hook": False,
            }
        ),
    )
    return _framed(_object(_DATA, "OkMsg", b"}" + _plain("cfg") + config + b"s"))


def error(cause: str) -> bytes:
    return _framed(_object(_DATA, "ErrorMsg", _plain({"cause": cause})))


def _plain(value: object) -> bytes:
    return pickle.dumps(value, protocol=2)[_PLAIN_BEGIN:_PLAIN_END]


def _object(module: str, name: str, state: bytes) -> bytes:
    """Return the opcodes of an object: GLOBAL, EMPTY_TUPLE, NEWOBJ, the attributes, BUILD."""
    return b"c" + f"{module}\n{name}\n".encode() + b")\x81" + state + b"b"


def _framed(opcodes: bytes) -> bytes:
    raw = b"\x80\x02" + opcodes + b"."
    return len(raw).to_bytes(HEAD_BYTES, "big") + raw
