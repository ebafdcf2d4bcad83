"""The environment variables that a call obeys, and when it looks at them.

KDA_TL_REGISTRY, KDA_TL_ARCH and KDA_TL_CHECK are honoured by the very next call after they change, so every call compares them;
it compares them raw, since `os.environ.get` encodes and decodes on each read (0.4 us against 0.05 us). KDA_TL_ON_MISS is read
where a kernel is not loaded yet, KDA_TL_NVTX where one is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

__all__ = ["UNCHECKED", "VARIABLES", "arch_setting", "check_setting", "nvtx", "on_miss", "registry_setting", "values_checked"]

VARIABLES = {
    "KDA_TL_REGISTRY": "registry folders, searched before all others",
    "KDA_TL_ARCH": "arch for cuda tensors, instead of the device's own",
    "KDA_TL_ON_MISS": "error (default) or build: what a call does that finds no artifact",
    "KDA_TL_CHECK": "1: ops check values that a device alone knows, and wait for it",
    "KDA_TL_NVTX": "1: ranges with the names of ops and kernels, for profilers",
}
"""Every variable that the runtime reads."""


_stored: object = getattr(os.environ, "_data", None)


def _raw(name: str) -> Callable[[], object]:
    """Reads one variable: None where it is not set, else something that changes when its value does."""
    if isinstance(_stored, dict):
        return partial(_stored.get, os.environ.encodekey(name))
    return partial(os.environ.get, name)


def _raw_value(value: str) -> object:
    """What `_raw` reads where a variable has that value."""
    return os.environ.encodevalue(value) if isinstance(_stored, dict) else value


registry_setting = _raw("KDA_TL_REGISTRY")
arch_setting = _raw("KDA_TL_ARCH")
check_setting = _raw("KDA_TL_CHECK")
UNCHECKED: tuple[object, ...] = (None, *(_raw_value(value) for value in ("", "0")))
"""What `check_setting` gives where KDA_TL_CHECK is off. All else goes through the checks, which refuse what is not 1."""


def on_miss() -> str:
    """KDA_TL_ON_MISS: "error" or "build". Raises ValueError for anything else."""
    return _one_of("KDA_TL_ON_MISS", {"": "error", "error": "error", "build": "build"})


def values_checked() -> bool:
    """KDA_TL_CHECK: whether ops check what a device alone knows. Raises ValueError for anything but 0 and 1."""
    return _one_of("KDA_TL_CHECK", {"": "0", "0": "0", "1": "1"}) == "1"


def nvtx() -> bool:
    """KDA_TL_NVTX: whether kernels run inside named ranges. Raises ValueError for anything but 0 and 1."""
    return _one_of("KDA_TL_NVTX", {"": "0", "0": "0", "1": "1"}) == "1"


def _one_of(name: str, allowed: dict[str, str]) -> str:
    value = os.environ.get(name, "")
    if value not in allowed:
        raise ValueError(f"{name} must be {' or '.join(filter(None, allowed))}, got {value!r}")
    return allowed[value]
