"""What it costs to hash the values of a pickle, without loading it.

The hash of a tuple is that of its elements, computed anew each time. A tuple that has another one twice, which has another one
twice, and so on, is hashed in exponential time: 100 bytes occupy a processor for days, in C code that no signal interrupts.
"""

from __future__ import annotations

from pickletools import OpcodeInfo

from holdfast.domain.errors import MalformedMessage

_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
_MARK = None


class HashCost:
    """Follows the unpickler's stack and counts the elements that the hash of each value visits: 1 for what is no tuple."""

    def __init__(self, cost_max: int) -> None:
        """`cost_max`: of all values together."""
        self._left = cost_max
        self._stack: list[int | None] = []
        self._memo: dict[int, int] = {}

    def follow(self, opcode: OpcodeInfo, argument: object) -> None:
        """Execute one opcode. Raises `MalformedMessage` if the values are too expensive, or if the stack has too few."""
        name = opcode.name
        try:
            if name == "MARK":
                self._stack.append(_MARK)
            elif name in _GETS:
                self._push(self._memo[int(str(argument))])
            elif name in _PUTS:
                self._memo[int(str(argument))] = self._top()
            elif name == "MEMOIZE":
                self._memo[len(self._memo)] = self._top()
            elif name == "DUP":
                self._push(self._top())
            elif name == "TUPLE":
                self._push(1 + sum(self._pop_to_mark()))
            elif name in _TUPLES:
                self._push(1 + sum(self._pop() for _ in range(_TUPLES[name])))
            else:
                self._other(opcode)
        except (IndexError, KeyError):
            raise MalformedMessage("pickle", f"{name} without a value") from None

    def _other(self, opcode: OpcodeInfo) -> None:
        """Containers and objects hash in one step, or cannot be hashed."""
        taken = [each.name for each in opcode.stack_before]
        if "mark" in taken:
            self._pop_to_mark()
            taken = taken[: taken.index("mark")]
        for _ in taken:
            self._pop()
        for _ in opcode.stack_after:
            self._push(1)

    def _push(self, cost: int) -> None:
        self._left -= cost
        if self._left < 0:
            raise MalformedMessage("pickle", "tuples in tuples that would take too long to compare")
        self._stack.append(cost)

    def _top(self) -> int:
        cost = self._stack[-1]
        return 1 if cost is _MARK else cost

    def _pop(self) -> int:
        cost = self._stack.pop()
        return 1 if cost is _MARK else cost

    def _pop_to_mark(self) -> list[int]:
        costs: list[int] = []
        while (cost := self._stack.pop()) is not _MARK:
            costs.append(cost)
        return costs
