"""Parsing Python sources in a process that has other threads."""

from __future__ import annotations

import ast
import time


def parse(source: str, mode: str = "exec") -> ast.AST:
    """`ast.parse`, repeated where another thread was in it at the same time.

    CPython 3.11 and 3.12 count how deep the tree under construction is in a variable that all threads share; when a
    garbage collection lets another thread parse meanwhile, they say SystemError ("AST constructor recursion depth
    mismatch") or RecursionError about a sound source.

    Raises:
        SyntaxError: the source is not valid.
        RecursionError: it is nested too deeply.
    """
    for attempt in range(20):
        try:
            return ast.parse(source, mode=mode)
        except SystemError:
            time.sleep(0.002 * attempt)
        except RecursionError:
            if attempt >= 2:
                raise
    return ast.parse(source, mode=mode)
