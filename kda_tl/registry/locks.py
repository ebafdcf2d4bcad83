"""Locks that the kernel drops when their holder dies, and the temporary folders that they protect."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["exclusive", "remove_stale", "remove_tree", "temporary_folder"]

_PREFIX = ".tmp-"
_UNLOCKABLE_AGE = 3600.0  # seconds; where the file system has no locks, only age tells a dead builder from a live one


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Holds the lock file at `path`, which is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """A new folder inside `parent`, removed at the end unless it was renamed by then.

    It is locked while its maker lives. tempfile's folders have mode 0700, which would survive the rename and hide the
    artifact from other users.
    """
    while True:
        path = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        path.mkdir()
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        _lock(descriptor, fcntl.LOCK_EX)
        if path.exists():  # before the lock was held, another builder could take it for a dead one's
            break
        os.close(descriptor)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def remove_stale(parent: Path, min_age: float = 0.0, dry_run: bool = False) -> list[Path]:
    """Removes what dead builders left in `parent` at least `min_age` seconds ago, and returns the paths."""
    removed = []
    for path in sorted(parent.glob(f"{_PREFIX}*")):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            age = time.time() - os.fstat(descriptor).st_mtime
            held = _lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if held is False or age < (min_age if held else max(min_age, _UNLOCKABLE_AGE)):
                continue
            if not dry_run:
                shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        finally:
            os.close(descriptor)
    return removed


def remove_tree(path: Path) -> None:
    """Removes a folder so that nobody sees it half removed."""
    aside = path.parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def _lock(descriptor: int, how: int) -> bool | None:
    """True: locked. False: somebody else holds it. None: this file system cannot lock folders."""
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
