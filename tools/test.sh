#!/bin/sh
# Everything that has to hold: style, types, tests. Arguments go to pytest.
set -eu
. "$(dirname -- "$0")/env.sh"
cd -- "$checkout"
ruff check
ruff format --check
mypy
# Tensors in tests are small: threads that wait for each other would take most of the time.
export OMP_NUM_THREADS=1
# Two processes, a test file in one of them: its fixtures are made once. What is compiled for all is made once for both.
python -m pytest -n 2 --dist loadfile "$@"
