"""The same program gives the same source in every process.

TileLang packs the shared memory of a kernel in an order that ends on the buffers' names, and names alone do not tell apart the
workspaces that several reductions of one kernel bring along: those fall back to the order of their addresses, which changes
from process to process, and with it the source, the cubin and the hash of the artifact. So buffers that share a name get names
of their own, in the order of the program text, just before they are packed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["distinct_names", "distinct_shared_buffers"]

_lock = threading.RLock()


def distinct_names(names: list[str]) -> list[str]:
    """`names`, with a number added to those that occurred before; no two are alike, and equal input gives equal output."""
    taken = set(names)
    seen: set[str] = set()
    result = []
    for name in names:
        new, count = name, 0
        while new in seen or (count and new in taken):
            count += 1
            new = f"{name}_{count}"
        seen.add(new)
        result.append(new)
    return result


@contextmanager
def distinct_shared_buffers() -> Iterator[None]:
    """While it lasts, TileLang's lowering gives shared buffers of one kernel different names before it packs them."""
    from tilelang import transform

    original: Callable[..., Any] = transform.MergeSharedMemoryAllocations

    def renaming(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
        pack = original(*arguments, **options)
        return lambda module: pack(_rename(module))

    with _lock:
        transform.MergeSharedMemoryAllocations = renaming
        try:
            yield
        finally:
            transform.MergeSharedMemoryAllocations = original


def _rename(module: Any) -> Any:
    from tilelang import tvm

    tirx = tvm.tirx
    functions = {}
    for name, function in module.functions.items():
        if not isinstance(function, tirx.PrimFunc):
            continue
        buffers: list[Any] = []

        def visit(node: Any, found: list[Any] = buffers) -> None:
            if isinstance(node, tirx.AllocBuffer) and node.buffer.scope().startswith("shared"):
                found.append(node.buffer.data)

        tirx.stmt_functor.post_order_visit(function.body, visit)
        names = distinct_names([str(variable.name) for variable in buffers])
        renamed = {
            variable: tirx.Var(new, variable.type_annotation)
            for variable, new in zip(buffers, names, strict=True)
            if str(variable.name) != new
        }
        if renamed:
            functions[name] = function.with_body(tirx.stmt_functor.substitute(function.body, renamed))
    if not functions:
        return module
    result = module.clone() if hasattr(module, "clone") else tvm.IRModule(dict(module.functions.items()), attrs=module.attrs)
    for name, function in functions.items():
        result.update_func(name, function)
    return result
