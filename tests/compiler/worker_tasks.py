"""What worker processes run in tests: importable there, and quick to import."""

import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from kda_tl.compiler.errors import BuildError


class Unpicklable(Exception):
    def __init__(self, text: str, more: str) -> None:
        super().__init__(text)


def act(task: tuple[str, Any]) -> Any:
    what, value = task
    if what == "return":
        return os.getpid(), value
    if what == "raise":
        raise BuildError(value)
    if what == "raise strange":
        raise Unpicklable(value, "")
    if what == "abort":
        os.abort()
    if what == "kill":
        os.kill(os.getpid(), value)
    if what == "return and exit":
        threading.Timer(0.1, os._exit, (value,)).start()
        return os.getpid(), value
    if what == "exit":
        os._exit(value)
    if what == "wait":  # until it is told to stop; value: the folder for what it leaves
        with tempfile.TemporaryDirectory() as held:
            (Path(value) / f"started-{os.getpid()}").write_text(held)
            time.sleep(600)
    raise AssertionError(what)


def main() -> None:
    """worker_tasks.py FOLDER: two workers that wait; prints `interrupted` when Ctrl-C ended them."""
    from kda_tl.compiler.workers import run_tasks

    try:
        for _ in run_tasks(act, [("wait", sys.argv[1])] * 3, 2):
            pass
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
