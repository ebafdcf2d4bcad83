#!/bin/sh
# Everything that has to hold: style, types, tests. Arguments go to pytest.
set -eu
. "$(dirname -- "$0")/env.sh"
cd -- "$checkout"
ruff check
ruff format --check
mypy
python -m pytest "$@"
