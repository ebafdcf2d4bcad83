#!/bin/sh
# From source to a checked result on any machine, no GPU needed, in an environment of its own. Arguments go to kda-tl demo.
set -eu
. "$(dirname -- "$0")/env.sh"
cd -- "$checkout"
exec python -m kda_tl.cli.main demo "$@"
