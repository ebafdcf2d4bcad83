"""Where registries are looked for, and where a build goes."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from .errors import RegistryError

__all__ = ["checkout_root", "default_root", "install_command", "is_writable", "named_roots", "search_path"]

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = _PACKAGE / "_artifacts"
_PROJECT_NAME = re.compile(r"""^name\s*=\s*["']kda-tl["']\s*(#.*)?$""", re.MULTILINE)


def checkout_root() -> Path | None:
    """The folder with this project's pyproject.toml above the package; None for an installed package."""
    root = _PACKAGE.parent
    try:
        text = (root / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return root if _PROJECT_NAME.search(text) else None


def install_command(extras: str) -> str:
    """What installs this package with `extras`, for messages: by the path of the repository, since no index has it."""
    root = checkout_root()
    if root is not None:
        return f"pip install {shlex.quote(f'{root}[{extras}]')}"
    return f"pip install 'CHECKOUT[{extras}]' (CHECKOUT: the path of the kda-tl repository)"


def named_roots() -> list[Path]:
    """The folders of $KDA_TL_REGISTRY, absolute; parts that are empty or blank are none."""
    parts = os.environ.get("KDA_TL_REGISTRY", "").split(os.pathsep)
    return [Path(os.path.abspath(os.path.expanduser(part))) for part in parts if part.strip()]


def search_path() -> list[Path]:
    """The registry roots in the order of their precedence, whether or not they exist.

    $KDA_TL_REGISTRY (one or more folders separated by os.pathsep), build/ of a checkout, the user cache
    ($XDG_CACHE_HOME or ~/.cache)/kda-tl, and the artifacts shipped in a wheel.
    """
    roots = named_roots()
    checkout = checkout_root()
    if checkout is not None:
        roots.append(checkout / "build")
    cache = _user_cache()
    if cache is not None:
        roots.append(cache / "kda-tl")
    roots.append(_SHIPPED)
    return list(dict.fromkeys(Path(os.path.abspath(root)) for root in roots))


def default_root() -> Path:
    """The first folder of the search path that a build can write to; the artifacts of a wheel are never written.

    Raises:
        RegistryError: none of them is writable.
    """
    candidates = [root for root in search_path() if root != _SHIPPED]
    for root in candidates:
        if is_writable(root):
            return root
    tried = ", ".join(map(str, candidates))
    raise RegistryError(f"no writable registry (tried {tried}): set KDA_TL_REGISTRY to a folder that you may write to")


def _user_cache() -> Path | None:
    given = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(given):  # the XDG specification says to ignore a relative one
        return Path(given)
    home = os.path.expanduser("~")
    return Path(home) / ".cache" if os.path.isabs(home) else None


def is_writable(folder: Path) -> bool:
    """Whether `folder` is, or could be made to be, a folder that this user may write to."""
    existing = folder
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    effective = os.access in os.supports_effective_ids
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK, effective_ids=effective)
