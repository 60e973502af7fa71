"""Finds the lines to add to a training script so that it reports its steps. Reads the script; runs no code of it.

    import holdfast.train as hf
    …
    run = hf.attach()                  before the outermost loop around the optimizer's step
    for step in range(steps):
        run.begin_step(step)           first in the innermost loop around it
        …
        optimizer.step()
        run.end_step()                 after it

If the text does not show where a line belongs, the answer is `Unclear` with the reason.
"""

from __future__ import annotations

import ast
import difflib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.cli.script_frameworks import Framework, framework_of, imported, last_name

OPTIMIZERS = frozenset(
    (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "Adamax",
        "AdamW",
        "ASGD",
        "LBFGS",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "SGD",
    )
)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_CONDITIONS = (ast.If, ast.Match)


@dataclass(frozen=True, slots=True)
class Change:
    """`diff` applies with `patch`. `notes`: sentences for the reader of the diff."""

    diff: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Uses:
    """The script uses a framework, whose integration reports the steps."""

    framework: Framework


@dataclass(frozen=True, slots=True)
class Ready:
    """The script imports Holdfast: there is nothing to propose."""


@dataclass(frozen=True, slots=True)
class Unclear:
    """The lines to add cannot be determined. `reason` is a clause about the script."""

    reason: str


Found = Change | Uses | Ready | Unclear


def changes(text: str, name: str) -> Found:
    """Read the script `text`. `name`: of its file in the diff."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        return Unclear(f"it is not valid Python: {error}")
    if any(module.startswith("holdfast.") for module in imported(tree)):
        return Ready()
    if (framework := framework_of(tree)) is not None:
        return Uses(framework)
    found = step_in(tree)
    return found if isinstance(found, Unclear) else _Text(text, tree).change(found, name)


@dataclass(frozen=True, slots=True)
class Place:
    """A statement that ends a step, with the loops and conditions around it in its function, outermost first."""

    statement: ast.stmt
    around: tuple[ast.stmt, ...]
    function: str  # empty at the top of the file
    blocks: tuple[int, ...]  # which block of each statement around it: 0 = the body, others: else, except, case …

    @property
    def loops(self) -> list[ast.stmt]:
        return [each for each in self.around if isinstance(each, _LOOPS)]

    @property
    def conditional(self) -> bool:
        """Whether the innermost loop may go round without finishing a step, as with gradient accumulation."""
        inside = self.around[self.around.index(self.loops[-1]) + 1 :]
        return any(isinstance(each, _CONDITIONS) for each in inside)

    def after_both(self, other: Place) -> Place:
        """This place, or the statement that runs either this one or `other`, as `if amp: … else: …`."""
        for depth, (mine, its) in enumerate(zip(self.around, other.around, strict=False)):
            if mine is not its:
                break
            if self.blocks[depth] != other.blocks[depth]:
                return Place(mine, self.around[:depth], self.function, self.blocks[:depth])
        return self


def step_in(tree: ast.Module) -> Place | Unclear:
    """Return the place where a step ends: the optimizer's step in a loop, or in a function that is called in one loop."""
    optimizers = _optimizers(tree)
    found = list(_places(tree.body, lambda call: _steps(call, optimizers)))
    if not found:
        return Unclear("no call of an optimizer's step() was found in it")
    in_loops = []
    for place in found:
        callers = [each for each in _places(tree.body, _calls(place.function)) if each.loops]
        in_loops += [place] if place.loops else callers
    if not in_loops:
        return Unclear(f"the optimizer's step in line {found[0].statement.lineno} is in no loop of this file")
    if len({id(place.loops[-1]) for place in in_loops}) > 1:
        lines = ", ".join(str(place.statement.lineno) for place in in_loops)
        return Unclear(f"optimizers step in several loops (lines {lines}), and which of them trains is unclear")
    end = in_loops[-1]  # of several optimizers, the last one ends the step
    for place in in_loops:
        end = end.after_both(place)
    return end


def counter_of(place: Place) -> str:
    """The variable that is the number of finished steps at the top of the innermost loop; empty if none is known to be."""
    if place.conditional:
        return ""
    innermost = place.loops[-1]
    assert isinstance(innermost, ast.For | ast.AsyncFor | ast.While)
    assigned = {
        last_name(target) for loop in place.loops for each in ast.walk(loop) for target in getattr(each, "targets", ())
    }
    counted = [
        node.target.id
        for node in innermost.body
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name) and isinstance(node.op, ast.Add)
        if isinstance(node.value, ast.Constant) and node.value.value == 1 and node.target.id not in assigned
    ]
    if len(counted) == 1:
        return counted[0]
    match innermost:
        case ast.For(target=ast.Name(name), iter=ast.Call(func=ast.Name("range"), args=[_] | [_, _])):
            return name if len(place.loops) == 1 and name not in assigned else ""
    return ""


def _optimizers(tree: ast.Module) -> set[str]:
    """Return the names of variables and attributes that hold an optimizer, judged by assigned values and by names."""
    names = {last_name(node) for node in ast.walk(tree)}
    named = {name for name in names if "optim" in name.lower() or name == "opt"}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and last_name(node.value.func) in OPTIMIZERS
        ):
            named |= {last_name(target) for target in node.targets}
    return named - {""}


def _steps(call: ast.Call, optimizers: set[str]) -> bool:
    """`optimizer.step()` and `scaler.step(optimizer)`."""
    match call:
        case ast.Call(func=ast.Attribute(value=holder, attr="step"), args=args):
            return last_name(holder) in optimizers or any(last_name(each) in optimizers for each in args)
    return False


def _calls(function: str) -> Callable[[ast.Call], bool]:
    return lambda call: last_name(call.func) == function


def _places(
    body: Sequence[ast.stmt],
    wanted: Callable[[ast.Call], bool],
    around: tuple[ast.stmt, ...] = (),
    function: str = "",
    above: tuple[int, ...] = (),
) -> Iterator[Place]:
    """The simple statements with a call that is wanted. A function begins without the loops around its definition."""
    for statement in body:
        blocks = [getattr(statement, name, ()) for name in ("body", "orelse", "finalbody")]
        blocks += [each.body for name in ("handlers", "cases") for each in getattr(statement, name, ())]
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _places(statement.body, wanted, (), statement.name)
        elif any(blocks):
            for number, block in enumerate(blocks):
                yield from _places(block, wanted, (*around, statement), function, (*above, number))
        elif any(isinstance(node, ast.Call) and wanted(node) for node in ast.walk(statement)):
            yield Place(statement, around, function, above)


class _Text:
    """The lines of a script, and the places in them."""

    def __init__(self, text: str, tree: ast.Module) -> None:
        self._tree = tree
        self._lines = io.StringIO(text, newline="").readlines()  # as the parser counts them
        self._end = "\r\n" if self._lines[0].endswith("\r\n") else "\n"

    def change(self, place: Place, name: str) -> Change | Unclear:
        outermost, innermost, statement = place.loops[0], place.loops[-1], place.statement
        first = innermost.body[0]  # type: ignore[attr-defined]  # a loop
        if not all(map(self._starts_line, (outermost, innermost, first, statement))) or not self._ends_line(statement):
            return Unclear(f"the loop in line {innermost.lineno} has several statements in a line")
        module, run = self._free("hf", "holdfast_train"), self._free("run", "holdfast_run")
        counter = counter_of(place)
        begin = f"{run}.begin_step({counter or f'{run}.steps_finished'})"
        ended = statement.end_lineno or statement.lineno
        added = [
            (self._imports_end(), f"import holdfast.train as {module}"),
            (_first_line(outermost) - 1, f"{self._indent(outermost)}{run} = {module}.attach()"),
        ]
        notes = []
        if place.conditional:
            added.append((_first_line(innermost) - 1, f"{self._indent(innermost)}{begin}"))
            added.append((ended, f"{self._indent(statement)}{run}.end_step()"))
            added.append((ended, f"{self._indent(statement)}{begin}"))
            notes.append("The optimizer does not step in every round of the loop: a step lasts until it does.")
        else:
            added.append((_first_line(first) - 1, f"{self._indent(first)}{begin}"))
            added.append((ended, f"{self._indent(statement)}{run}.end_step()"))
        if not counter:
            notes.append("No variable that counts all steps was found: they are counted from 0 after each restart.")
        return Change(self._diff(added, name), tuple(notes))

    def _starts_line(self, statement: ast.stmt) -> bool:
        return not self._indent(statement).strip()

    def _ends_line(self, statement: ast.stmt) -> bool:
        line = self._lines[(statement.end_lineno or statement.lineno) - 1].encode()
        rest = line[statement.end_col_offset or 0 :].decode().strip()
        return not rest or rest.startswith("#")

    def _indent(self, statement: ast.stmt) -> str:
        """The text before it in its line. The parser counts bytes."""
        return self._lines[_first_line(statement) - 1].encode()[: statement.col_offset].decode()

    def _free(self, name: str, otherwise: str) -> str:
        """`name`, unless the script uses it for something else."""
        used = {part for node in ast.walk(self._tree) for part in (getattr(node, "id", ""), getattr(node, "arg", ""))}
        used |= {
            alias.asname or alias.name
            for node in ast.walk(self._tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        return otherwise if name in used else name

    def _imports_end(self) -> int:
        """The number of lines up to the end of the imports at the top of the file."""
        last = 0
        for statement in self._tree.body:
            is_docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if not is_docstring and not isinstance(statement, ast.Import | ast.ImportFrom):
                break
            last = statement.end_lineno or statement.lineno
        return last

    def _diff(self, added: Sequence[tuple[int, str]], name: str) -> str:
        """`added`: (number of lines before it, line), in the order of the result."""
        lines = list(self._lines)
        in_order = sorted(added, key=lambda each: each[0])
        for at, line in reversed(in_order):  # from the end, so that the positions of earlier lines stay valid
            if at and not lines[at - 1].endswith(("\n", "\r")):
                lines[at - 1] += self._end
            lines.insert(at, line + self._end)
        marked = difflib.unified_diff(self._lines, lines, name, name)
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in marked)


def _first_line(statement: ast.stmt) -> int:
    decorators: Sequence[ast.expr] = getattr(statement, "decorator_list", ())
    return min([statement.lineno, *(each.lineno for each in decorators)])
