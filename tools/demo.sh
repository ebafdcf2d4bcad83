#!/bin/sh
# The demonstration in an environment of its own. Arguments go to tools/demo.py.
set -eu
. "$(dirname -- "$0")/env.sh"
cd -- "$checkout"
exec python tools/demo.py "$@"
