"""Tool calls as text, the tools that answer them, and the built-in environment of both (``synth.tool_data``,
``reward.tool``).

An assistant turn that holds calls is a tool turn; one without is the final answer, checked by the task's verifier. Call
syntax:

``python``  one call per line, literal keyword arguments: ``calculator(expression='12 * 7')``
``json``    ``<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 7"}}</tool_call>``, as Hermes and Qwen templates write it

Calls are parsed as literals and never evaluated. An unknown tool, bad arguments or a time-out are observations: the
error text becomes the tool turn, the event says why. Only the standard library is imported, so that an environment's
process starts at once.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import operator
import os
import re
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Callable

from stages.running import syntax
from stages.running.sandbox import end_with_parent, lock_down

SYNTAXES = ("python", "json")
_CALL_LINE = re.compile(r"^\s*[A-Za-z_]\w*\s*\(")
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
API_CALL = re.compile(r"<API>\s*(\w+) ?\((.*?)\)\s*</API>", re.DOTALL)
_OUTPUT = 2000  # characters of a tool's answer that are shown


class BadCall(ValueError):
    """A call that cannot be made; the text becomes the observation. kind: syntax, unknown_tool, arguments, timeout or
    failed.
    """

    def __init__(self, kind: str, text: str):
        super().__init__(text)
        self.kind = kind


# -- calls as text -----------------------------------------------------------------------------------------------------


def parse_call(line: str) -> dict:
    """``{"name", "args"}`` of one python call with literal keyword arguments; raises BadCall."""
    try:
        node = syntax.parse(line.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise BadCall("syntax", f"error: cannot read the call {line.strip()[:80]!r}") from None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
        raise BadCall("syntax", "error: write calls as name(argument='value')")
    try:
        args = {k.arg: ast.literal_eval(k.value) for k in node.keywords}
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise BadCall("syntax", "error: arguments must be plain values") from None
    if None in args:
        raise BadCall("syntax", "error: arguments must be named one by one")
    return {"name": node.func.id, "args": args}


def parse_calls(text: str, syntax: str = "python") -> list[dict | BadCall]:
    """Calls of an assistant turn in order, those that cannot be read as the BadCall that says why; empty for a final
    answer.
    """
    found: list[dict | BadCall] = []
    if syntax == "json":
        for body in _TAGGED.findall(text):
            try:
                call = json.loads(body)
                given = call.get("arguments") or {}
                if not isinstance(given, dict):
                    raise ValueError("arguments have no names")
                found.append({"name": str(call["name"]), "args": given})
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                found.append(
                    BadCall("syntax", 'error: write calls as <tool_call>{"name": "NAME", "arguments": {}}</tool_call>')
                )
        return found
    for line in text.splitlines():
        if _CALL_LINE.match(line):
            try:
                found.append(parse_call(line))
            except BadCall as error:
                found.append(error)
    return found


def render_call(name: str, args: dict, syntax: str = "python") -> str:
    """A call as an assistant writes it."""
    if syntax == "json":
        return "<tool_call>" + json.dumps({"name": name, "arguments": args}, ensure_ascii=False) + "</tool_call>"
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})"


def stored_calls(text: str) -> list[dict]:
    """Calls of a message's ``function_calls``: ``[{"name", "arguments"}]``, with their ``id`` where one is written.

    One call per line in either syntax, or as OpenAI's API has them (``tool_calls`` as JSON, arguments a JSON string); a
    pretty-printed JSON list counts as one line. Raises BadCall.
    """
    text = text.strip()
    try:
        parts = [json.loads(text)]
    except (ValueError, RecursionError):
        parts = _TAGGED.findall(text) if "<tool_call>" in text else [line for line in text.splitlines() if line.strip()]
    calls: list[dict] = []
    for part in parts:
        if isinstance(part, str) and part.lstrip()[:1] in ("{", "["):
            try:
                part = json.loads(part)
            except (ValueError, RecursionError):
                raise BadCall("syntax", f"cannot read the call {part.strip()[:80]!r} as JSON") from None
        calls += [_call_of(call) for call in (part if isinstance(part, list) else [part])]
    for call in calls:
        try:
            json.dumps(call)
        except (TypeError, ValueError, RecursionError):
            raise BadCall("arguments", f"the arguments of {call['name']} are not plain values of JSON") from None
    return calls


def _call_of(call) -> dict:
    if isinstance(call, str):
        read = parse_call(call)
        return {"name": read["name"], "arguments": read["args"]}
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
        raise BadCall("syntax", f"{str(call)[:80]!r} names no function")
    given = inner.get("arguments", inner.get("parameters"))
    if isinstance(given, str):
        try:
            given = json.loads(given) if given.strip() else {}
        except (ValueError, RecursionError):
            raise BadCall("arguments", f"the arguments of {inner['name']} are no JSON: {given[:80]!r}") from None
    if not isinstance(given, (dict, type(None))):
        raise BadCall("arguments", f"the arguments of {inner['name']} have no names: {str(given)[:80]!r}")
    return {"name": inner["name"], "arguments": given or {}} | (
        {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    )


def stored_tools(text: str) -> list[dict]:
    """Tools of a message's ``functions`` in OpenAI's form, ``{"type": "function", "function": {"name", "description",
    "parameters"}}``, which chat templates expect.

    Tools in that form stay as they are. Flat ones ``{"name", "description", "parameters"}`` are put into it; parameters
    by name (``synth.tool_data``) become a JSON schema in which those without a default are required. Raises BadCall.
    """
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        raise BadCall("syntax", f"the tools are no JSON list: {text[:80]!r}") from None
    tools = []
    for tool in listed if isinstance(listed, list) else [listed]:
        inner = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"]:
            raise BadCall("syntax", f"the tool {str(tool)[:80]!r} has no name")
        if inner is not tool:
            tools.append(tool if "type" in tool else {"type": "function", **tool})
            continue
        schema = inner.get("parameters") or {}
        if (
            isinstance(schema, dict)
            and "properties" not in schema
            and not isinstance(schema.get("type"), str)
            and all(isinstance(p, dict) for p in schema.values())
        ):
            required = [name for name, about in schema.items() if "default" not in about]
            schema = {"type": "object", "properties": schema} | ({"required": required} if required else {})
        tools.append(
            {
                "type": "function",
                "function": {
                    "name": inner["name"],
                    "description": inner.get("description") or "",
                    "parameters": schema,
                },
            }
        )
    return tools


def substitute(text: str, results: dict[str, str], mode: str = "replace") -> str:
    """Text with inline ``<API>NAME(args)</API>`` calls replaced by (or, ``append``, followed by) their results
    (``synth.tool_data``).

    ``results`` maps ``NAME(args)`` to a result; an optional space before the bracket does not count. Calls without a
    result stay.
    """

    def one(match):
        result = results.get(f"{match.group(1)}({match.group(2)})")
        return match.group() if result is None else result if mode == "replace" else f"{match.group()} {result}"

    return API_CALL.sub(one, text)


def toolformer_gain(loss_no_call: float, loss_call_without_result: float, loss_call_with_result: float) -> float:
    """How much a call with its result lowers the weighted NLL of what follows; keep the call where it is at least tau_f
    (``synth.toolformer``).
    """
    return min(loss_no_call, loss_call_without_result) - loss_call_with_result


# -- tools -------------------------------------------------------------------------------------------------------------

_OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_LARGEST = 10**15


def calculate(expression: str) -> str:
    """Value of an arithmetic expression of numbers, ``+ - * / // % **`` and brackets, as text; bounded, so it cannot
    hang.
    """

    def value(node):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            out = node.value
        elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            a, b = value(node.left), value(node.right)
            if isinstance(node.op, ast.Pow) and abs(b) > 64:
                raise BadCall("arguments", "error: exponent too large")
            out = _OPERATORS[type(node.op)](a, b)
        elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            out = _OPERATORS[type(node.op)](value(node.operand))
        else:
            raise BadCall("arguments", "error: not an arithmetic expression")
        if isinstance(out, complex) or abs(out) > _LARGEST:
            raise BadCall("arguments", "error: number too large")
        return out

    try:
        result = value(syntax.parse(str(expression).strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError, OverflowError, TypeError) as error:
        if isinstance(error, BadCall):
            raise
        raise BadCall(
            "arguments",
            (
                "error: division by zero"
                if isinstance(error, ZeroDivisionError)
                else "error: not an arithmetic expression"
            ),
        ) from None
    return str(int(result)) if float(result).is_integer() else f"{result:.10g}"


def search(query: str, table: dict[str, str], limit: int = 5) -> str:
    """Entries of a small table whose key holds every word of the query, as ``key: value`` lines."""
    words = set(re.findall(r"\w+", str(query).lower()))
    hits = [
        f"{key}: {value}" for key, value in table.items() if words and words <= set(re.findall(r"\w+", key.lower()))
    ]
    if not hits:
        raise BadCall("failed", "error: nothing found")
    return "\n".join(hits[:limit])


def run_python(code: str, timeout_s: float = 2.0) -> str:
    """What a program prints, or its error, run in a process of its own that is locked down as the sandbox's are and
    killed when it takes too long.
    """
    read, write = os.pipe()
    folder = tempfile.mkdtemp(prefix="tool-")
    pid = os.fork()
    if pid == 0:
        try:
            os.setpgid(0, 0)
            end_with_parent()
            nothing = os.open(os.devnull, os.O_RDWR)
            # the episode's pipes are not the program's
            for fd in map(int, os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else range(3, 256)):
                with contextlib.suppress(OSError):
                    os.dup2(nothing, fd) if fd <= 2 else os.close(fd) if fd not in (write, nothing) else None
            os.chdir(folder)
            lock_down(folder)
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                try:
                    exec(compile(str(code), "<tool>", "exec"), {"__name__": "__main__"})
                    kind = "ok"
                except MemoryError:
                    out, kind = io.StringIO("error: out of memory"), "failed"
                except BaseException as error:
                    out.write(f"error: {type(error).__name__}: {str(error)[:200]}")
                    kind = "failed"
            data = (kind + "\n" + out.getvalue()[:_OUTPUT]).encode("utf-8", "replace")
            while data:
                data = data[os.write(write, data) :]
        finally:
            os._exit(0)
    os.close(write)
    data, deadline = b"", time.monotonic() + timeout_s
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([read], [], [], left)[0]:
                raise BadCall("timeout", f"error: time-out after {timeout_s:g} s")
            chunk = os.read(read, 65536)
            if not chunk:
                break
            data += chunk
    finally:
        os.close(read)
        for end in (os.killpg, os.kill):  # the group exists once the child has called setpgid
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        shutil.rmtree(folder, ignore_errors=True)
    kind, _, said = data.decode("utf-8", "replace").partition("\n")
    if kind != "ok":
        raise BadCall("failed", said or "error: the program was ended")
    return said.strip()


#: name -> (description, function of the environment and the call's arguments)
TOOLS: dict[str, tuple[str, Callable]] = {
    "calculator": (
        "value of an arithmetic expression",
        lambda environment, expression: f"{str(expression).strip()} = {calculate(expression)}",
    ),
    "search": ("looks a word up", lambda environment, query: search(query, environment.table)),
    "python": (
        "runs a program and shows what it prints",
        lambda environment, code: run_python(code, environment.tool_timeout_s),
    ),
}


def arguments_of(name: str) -> list[str]:
    """Names of a tool's arguments."""
    return list(inspect.signature(TOOLS[name][1]).parameters)[1:]


def definitions(names) -> str:
    """JSON list of tool definitions, for the ``functions`` field of a system message (``synth.tool_data``)."""
    return json.dumps(
        [
            {"name": n, "description": TOOLS[n][0], "parameters": {a: {"type": "string"} for a in arguments_of(n)}}
            for n in names
        ]
    )


def _told(tools, syntax: str) -> str:
    """What a policy is told of tools, each (name, description, names of its arguments)."""
    if syntax == "json":
        listed = "\n".join(
            json.dumps({"name": name, "description": description, "parameters": arguments})
            for name, description, arguments in tools
        )
        return f'Tools:\n{listed}\nCall one with <tool_call>{{"name": "NAME", "arguments": {{}}}}</tool_call>.'
    return f"Tools: {', '.join(f'{name}({chr(44).join(arguments)})' for name, _, arguments in tools)}"


def system_message(names, syntax: str = "python") -> dict:
    """The system message that tells a policy which tools there are and how to call them."""
    return {
        "role": "system",
        "content": _told([(n, TOOLS[n][0], arguments_of(n)) for n in names], syntax),
        "functions": definitions(names),
    }


def tells_tools(message: dict) -> bool:
    """Whether a message's text itself tells its ``functions`` and how to call them, as :func:`system_message` writes
    it: a template need not.
    """
    if not message.get("functions"):
        return False
    try:
        tools = [(f["name"], f.get("description"), list(f["parameters"])) for f in json.loads(message["functions"])]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False
    return bool(tools) and any(_told(tools, syntax) in (message.get("content") or "") for syntax in SYNTAXES)


def text_with_tools(message: dict) -> str:
    """A message's text for whoever reads it without a chat template: its tools, where the text does not tell them, and
    its calls follow as they are stored.
    """
    more = ("function_calls",) if tells_tools(message) else ("functions", "function_calls")
    return "\n".join(
        [message.get("content") or "", *(message[name] for name in more if message.get(name))]
    ).removeprefix("\n")


def in_text(messages: list[dict]) -> list[dict]:
    """The conversation with its tools and calls written into the messages' texts, one JSON object each, for chat
    templates that show neither. Raises BadCall.
    """
    out = []
    for message in messages:
        message = dict(message)
        told_already = tells_tools(message)
        if (functions := message.pop("functions", None)) and not told_already:
            listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in stored_tools(functions))
            told = (
                f'Tools:\n{listed}\nCall one with <tool_call>{{"name": "NAME", "arguments": {{}}}}</tool_call>.'
                if listed
                else ""
            )
            message["content"] = "\n\n".join(text for text in (told, message.get("content")) if text)
        if written := message.pop("function_calls", None):
            calls = [render_call(call["name"], call["arguments"], "json") for call in stored_calls(written)]
            message["content"] = "\n".join(text for text in (message.get("content"), *calls) if text)
        out.append(message)
    return out


class ToolEnvironment:
    """Questions whose answers need tools. A turn with calls is answered by one tool message per call; a turn without is
    the final answer.

    The task's table for ``search`` stands in ``extra_json`` as ``{"table": {key: value}}``. Reward 1 for a right final
    answer.

    Args:
        tools: which tools there are. call_syntax: ``python`` or ``json``. max_calls: calls of one turn that are made;
            further ones fail.
    """

    def __init__(
        self,
        tools=("calculator", "search"),
        call_syntax: str = "python",
        max_calls: int = 4,
        tool_timeout_s: float = 2.0,
    ):
        unknown = [t for t in tools if t not in TOOLS]
        if unknown:
            raise ValueError(f"there is no tool {unknown[0]!r}; the tools are {', '.join(TOOLS)}")
        if call_syntax not in SYNTAXES:
            raise ValueError(f"call_syntax={call_syntax!r}: write one of {', '.join(SYNTAXES)}")
        self.tools = tuple(tools)
        self.syntax = call_syntax
        self.max_calls = max_calls
        self.tool_timeout_s = tool_timeout_s

    def reset(self, task: dict, seed: int) -> list[dict]:
        self.task = task
        self.table = json.loads(task.get("extra_json") or "{}").get("table") or {}
        told, given = system_message(self.tools, self.syntax), list(task["prompt"])
        if given and given[0]["role"] == "system":
            return [{**told, "content": f"{told['content']}\n\n{given[0]['content']}"}, *given[1:]]
        return [told, *given]

    def step(self, action: str):
        calls = parse_calls(action, self.syntax)
        if not calls:
            return self._answer(action)
        messages, events = [], []
        for number, call in enumerate(calls):
            name = call["name"] if isinstance(call, dict) else "call"
            try:
                said = str(self._call(call, number))
                events.append(f"tool:{name}")
            except BadCall as error:
                said = str(error)
                events.append(f"error:{error.kind}")
            except Exception as error:
                # whatever the policy wrote, a tool that cannot answer it costs the call and not the trajectory
                said = f"error: {type(error).__name__}: {str(error)[:200]}"
                events.append("error:failed")
            messages.append({"role": "tool", "name": name, "content": said[:_OUTPUT]})
        return messages, 0.0, False, events

    def _call(self, call, number: int) -> str:
        if isinstance(call, BadCall):
            raise call
        if number >= self.max_calls:
            raise BadCall("failed", f"error: more than {self.max_calls} calls in one turn")
        if call["name"] not in self.tools:
            raise BadCall("unknown_tool", f"error: there is no tool {call['name'][:40]}")
        if sorted(call["args"]) != sorted(arguments_of(call["name"])):
            raise BadCall("arguments", f"error: {call['name']} takes {', '.join(arguments_of(call['name']))}")
        return TOOLS[call["name"]][1](self, **call["args"])

    def _answer(self, action: str):
        from stages.verification.verifiers import VERIFIERS, verifier_of

        correct, extracted = VERIFIERS[verifier_of(self.task)](self.task, action, False)
        return (
            [],
            float(correct),
            True,
            [
                "answered",
                *(["goal_verified"] if correct else []),
                *([] if extracted is not None else ["error:unreadable_answer"]),
            ],
        )
