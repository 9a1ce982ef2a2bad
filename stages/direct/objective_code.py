"""Preference losses as text: read, checked and evaluated here, never executed (``flow.objective_discovery``, ``align
method=written``).

    def loss(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, beta):
        h = (policy_chosen_logps - policy_rejected_logps) - (reference_chosen_logps - reference_rejected_logps)
        return softplus(-beta * h)

or the expression alone, with the short names ``pc pr rc rr``: ``softplus(-beta * ((pc - pr) - (rc - rr)))``.

The text is Python to look at, but only this much of it: numbers, arithmetic, comparisons, assignments to names, one
``return`` at the end and the element-wise functions of :data:`FUNCTIONS` (also as ``torch.f(x)``, ``F.f(x)`` or
``x.f()``). It becomes a tree that is walked with tensors, so a loss from anywhere, a language model too, can neither
read a file, loop, nor look at other rows. Autograd gives its gradient.
"""

from __future__ import annotations

import ast
import functools
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F

from stages.running import syntax

#: Names of the four inputs, each a tensor [B] of sequence log-probs (sums over tokens), in the order of the losses'
#: arguments.
INPUTS = {
    "pc": "policy_chosen_logps",
    "pr": "policy_rejected_logps",
    "rc": "reference_chosen_logps",
    "rr": "reference_rejected_logps",
}
MAX_CHARACTERS, MAX_NODES = 4000, 400
START = (
    "def loss(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, beta):\n"
)


class ObjectiveError(ValueError):
    """The text is no loss; the message says what to write instead."""


def _clamp(x, min=None, max=None):  # noqa: A002 - torch's argument names
    return torch.clamp(x, min=min, max=max)


FUNCTIONS: dict[str, Any] = {
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "square": torch.square,
    "abs": torch.abs,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "logsigmoid": F.logsigmoid,
    "softplus": F.softplus,
    "relu": F.relu,
    "sign": torch.sign,
    "atan": torch.atan,
    "sin": torch.sin,
    "cos": torch.cos,
    "erf": torch.erf,
    "neg": torch.neg,
    "clamp": _clamp,
    "clip": _clamp,
    "pow": torch.pow,
    "where": torch.where,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "lerp": torch.lerp,
    "detach": torch.Tensor.detach,
    "float": lambda x: x.to(torch.get_default_dtype()),
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
}
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
}
_UNARY = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}
_COMPARE = {ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge}
_MODULES = {"torch", "F", "nn", "functional", "np", "math"}
_CONSTANTS = {"pi": math.pi, "e": math.e}


class Program:
    """A loss from text; called like any loss of ``stages.direct.direct_losses``: ``program(pc, pr, rc, rr, beta=0.05)
    -> [B]``.

    Raises:
        ObjectiveError: the text is not of the accepted form.
    """

    def __init__(self, text: str):
        self.text = text.strip()
        if not self.text:
            raise ObjectiveError("The loss is empty; write for example softplus(-beta * ((pc - pr) - (rc - rr))).")
        if len(self.text) > MAX_CHARACTERS:
            raise ObjectiveError(
                f"The loss has {len(self.text)} characters, more than {MAX_CHARACTERS}; write a shorter one."
            )
        self.names, self.steps, self.result = _read(self.text)

    @property
    def normal_form(self) -> str:
        """The same loss always reads the same, whatever its comments and spaces."""
        return "\n".join(
            [
                *(f"{name} = {value!r}" for name, value in self.names.items()),
                *(f"{name} = {ast.unparse(value)}" for name, value in self.steps),
                ast.unparse(self.result),
            ]
        )

    def __call__(self, pc, pr, rc, rr, *, beta: float) -> torch.Tensor:
        """Loss per pair [B]; gradients flow to every input that has them."""
        values = dict(self.names, beta=float(beta))
        for (short, long), tensor in zip(INPUTS.items(), (pc, pr, rc, rr)):
            values[short] = values[long] = tensor
        try:
            for name, value in self.steps:
                values[name] = _value(value, values)
            found = _value(self.result, values)
        except ObjectiveError:
            raise
        except (TypeError, ValueError, LookupError, RuntimeError, ArithmeticError, AttributeError) as error:
            raise ObjectiveError(f"The loss cannot be computed: {type(error).__name__}: {error}") from None
        if not isinstance(found, torch.Tensor) or found.shape != pc.shape or not found.is_floating_point():
            what = f"a tensor of shape {list(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)
            raise ObjectiveError(
                f"The loss of {len(pc)} pairs must be {len(pc)} numbers, one per pair, and is {what}; do not average"
                " over pairs."
            )
        return found


def _read(text: str) -> tuple[dict[str, float], list[tuple[str, ast.expr]], ast.expr]:
    """(constants among the arguments, assignments in order, the returned expression)."""
    try:
        tree = syntax.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ObjectiveError(f"The loss is not readable as Python: {error}") from None
    body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    if len(body) != 1 or not isinstance(body[0], (ast.FunctionDef, ast.Expr)):
        raise ObjectiveError(
            "Write one function that returns the loss per pair, or one expression, and nothing beside it."
        )
    if sum(1 for _ in ast.walk(body[0])) > MAX_NODES:
        raise ObjectiveError(f"The loss has more than {MAX_NODES} operations and names; write a simpler one.")
    constants, known = {}, {*INPUTS, *INPUTS.values(), "beta"}
    if isinstance(body[0], ast.Expr):
        steps, result = [], body[0].value
    else:
        constants, steps, result = _function(body[0], known)
    known |= set(constants)
    for name, value in steps:
        _check(value, known)
        known.add(name)
    _check(result, known)
    return constants, steps, result


def _function(node: ast.FunctionDef, known: set[str]):
    arguments = node.args
    if arguments.vararg or arguments.kwarg or arguments.posonlyargs or node.decorator_list:
        raise ObjectiveError(
            "The function takes named arguments only and has no decorator; begin with " + START.strip()
        )
    named = [*arguments.args, *arguments.kwonlyargs]
    defaults = (
        [None] * (len(arguments.args) - len(arguments.defaults))
        + list(arguments.defaults)
        + list(arguments.kw_defaults)
    )
    constants = {}
    for argument, default in zip(named, defaults):
        if argument.arg in known or argument.arg == "self":
            continue
        if default is None:
            raise ObjectiveError(
                f"The function has an argument {argument.arg!r} that nobody gives; its arguments are "
                f"{', '.join(INPUTS.values())} and beta, others need a number as default."
            )
        constants[argument.arg] = _number(default)
    body = node.body
    if (
        isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        body = body[1:]
    if not body or not isinstance(body[-1], ast.Return) or body[-1].value is None:
        raise ObjectiveError("The function must end with `return` and the loss per pair.")
    steps = []
    for line in body[:-1]:
        if isinstance(line, ast.Assign) and len(line.targets) == 1 and isinstance(line.targets[0], ast.Name):
            steps.append((line.targets[0].id, line.value))
        elif isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.value is not None:
            steps.append((line.target.id, line.value))
        elif isinstance(line, ast.AugAssign) and isinstance(line.target, ast.Name):
            steps.append((line.target.id, ast.BinOp(ast.Name(line.target.id, ast.Load()), line.op, line.value)))
        else:
            raise ObjectiveError(
                f"Line {line.lineno} is a {type(line).__name__}: only assignments to one name and a final return are"
                " read. Write where(condition, a, b) instead of if."
            )
    return constants, steps, body[-1].value


def _number(node: ast.expr) -> float:
    sign = 1.0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        sign, node = -1.0, node.operand
    if (
        not isinstance(node, ast.Constant)
        or isinstance(node.value, bool)
        or not isinstance(node.value, (int, float))
        or not abs(node.value) <= 1e9
    ):
        raise ObjectiveError(f"{ast.unparse(node)} is no number between -1e9 and 1e9.")
    return sign * float(node.value)


def _function_of(node: ast.Call) -> tuple[str, ast.expr | None]:
    """(name of the function, the object of a method call)."""
    if isinstance(node.func, ast.Name):
        return node.func.id, None
    if isinstance(node.func, ast.Attribute):
        inner = node.func.value
        while isinstance(inner, ast.Attribute) and inner.attr in _MODULES:
            inner = inner.value
        return (
            (node.func.attr, None)
            if isinstance(inner, ast.Name) and inner.id in _MODULES
            else (node.func.attr, node.func.value)
        )
    raise ObjectiveError(f"{ast.unparse(node.func)} is not the name of a function.")


def _check(node: ast.expr, known: set[str]) -> None:
    """Refuse everything that :func:`_value` has no meaning for."""
    if isinstance(node, ast.Constant):
        _number(node)
    elif isinstance(node, ast.Name):
        if node.id not in known:
            raise ObjectiveError(
                f"{node.id} is not known; the inputs are {', '.join(INPUTS.values())} (short: {', '.join(INPUTS)}) and"
                " beta."
            )
    elif isinstance(node, ast.Attribute):
        if not (
            isinstance(node.value, ast.Name)
            and (
                node.value.id == "self" and node.attr == "beta" or node.value.id in _MODULES and node.attr in _CONSTANTS
            )
        ):
            raise ObjectiveError(
                f"{ast.unparse(node)} is not available; use the inputs, beta and the functions {', '.join(FUNCTIONS)}."
            )
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        _check(node.left, known)
        _check(node.right, known)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        _check(node.operand, known)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
        _check(node.left, known)
        _check(node.comparators[0], known)
    elif isinstance(node, ast.Call):
        name, of = _function_of(node)
        if name in ("mean", "sum"):
            raise ObjectiveError(
                f"{ast.unparse(node)}: the loss is one number per pair and is averaged later; leave {name} out."
            )
        if name not in FUNCTIONS:
            raise ObjectiveError(f"The function {name} is not available; there are {', '.join(FUNCTIONS)}.")
        if any(isinstance(a, ast.Starred) for a in node.args) or any(
            k.arg not in ("min", "max") for k in node.keywords
        ):
            raise ObjectiveError(f"{ast.unparse(node)}: write the arguments of {name} one by one.")
        for part in [*([of] if of is not None else []), *node.args, *(k.value for k in node.keywords)]:
            _check(part, known)
    else:
        raise ObjectiveError(
            f"{ast.unparse(node)}: a {type(node).__name__} is not read. Use arithmetic, comparisons inside where(), and"
            f" {', '.join(FUNCTIONS)}."
        )


def _value(node: ast.expr, values: dict[str, Any]):
    if isinstance(node, ast.Constant):
        return float(node.value)
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Attribute):
        return values["beta"] if node.attr == "beta" else _CONSTANTS[node.attr]
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_value(node.left, values), _value(node.right, values))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_value(node.operand, values))
    if isinstance(node, ast.Compare):
        return _COMPARE[type(node.ops[0])](_value(node.left, values), _value(node.comparators[0], values))
    name, of = _function_of(node)
    given = [_value(part, values) for part in [*([of] if of is not None else []), *node.args]]
    like = next((x for x in given if isinstance(x, torch.Tensor) and x.is_floating_point()), values["pc"])
    if name not in ("clamp", "clip"):  # torch's functions want tensors where people write numbers
        given = [
            x if isinstance(x, torch.Tensor) else torch.as_tensor(x, dtype=like.dtype, device=like.device)
            for x in given
        ]
    elif not isinstance(given[0], torch.Tensor):
        given[0] = torch.as_tensor(given[0], dtype=like.dtype, device=like.device)
    return FUNCTIONS[name](*given, **{k.arg: _value(k.value, values) for k in node.keywords})


@functools.lru_cache(maxsize=64)
def program_of(text: str) -> Program:
    return Program(text)


def written_loss(pc, pr, rc, rr, *, beta: float = 0.05, code: str) -> torch.Tensor:
    """The loss that ``code`` says, per pair [B]; inputs are sequence log-probs [B] (``align method=written``)."""
    return program_of(code)(pc, pr, rc, rr, beta=beta)


def failures(program: Program, beta: float, min_decreasing: float = 0.5) -> list[str]:
    """What is wrong with the loss, as sentences; empty when it can be trained with (``flow.objective_discovery``, unit
    tests).

    Checked in float32 on 256 ordinary pairs, on every combination of extreme log-probs (0 to -1000) and on a single
    pair: one finite number per pair, finite gradients, and a loss that falls where the margin grows, for more than
    ``min_decreasing`` of the ordinary pairs.
    """
    generator = torch.Generator().manual_seed(0)
    ref = -torch.rand(2, 256, generator=generator) * 300 - 1
    ordinary = torch.cat([ref + 5 * torch.randn(2, 256, generator=generator), ref])
    extreme = torch.cartesian_prod(*[torch.tensor([0.0, -1e-6, -1.0, -1000.0])] * 4).T.contiguous()
    found = []
    for what, inputs in (
        ("ordinary pairs", ordinary),
        ("extreme log-probs (0, -1e-6, -1, -1000)", extreme),
        ("a single pair", ordinary[:, :1]),
    ):
        leaves = [row.clone().requires_grad_(True) for row in inputs]
        try:
            loss = program(*leaves, beta=beta)
        except ObjectiveError as error:
            return [f"On {what}: {error}"]
        if not torch.isfinite(loss).all():
            worst = int((~torch.isfinite(loss)).nonzero()[0])
            found.append(
                f"On {what} the loss is not finite, for example {loss[worst].item()} at"
                f" {[round(float(v), 3) for v in inputs[:, worst]]}; clamp what goes into exp, log and powers."
            )
            continue
        if not loss.requires_grad:
            return [*found, "The loss does not depend on the policy's log-probs."]
        gradients = torch.autograd.grad(loss.sum(), leaves[:2], allow_unused=True)
        if all(g is None for g in gradients):
            return [*found, "The loss does not depend on the policy's log-probs."]
        if any(g is not None and not torch.isfinite(g).all() for g in gradients):
            found.append(f"On {what} the gradient is not finite; clamp what goes into exp, log, sqrt and powers.")
    if not found:
        pc, pr, rc, rr = ordinary.double()
        with torch.no_grad():
            falls = (
                (program(pc + 0.5, pr - 0.5, rc, rr, beta=beta) < program(pc, pr, rc, rr, beta=beta))
                .double()
                .mean()
                .item()
            )
        if falls <= min_decreasing:
            found.append(
                f"The loss falls with a growing margin of the chosen response for only {falls:.0%} of the pairs; more"
                f" than {min_decreasing:.0%} are needed."
            )
    return found
