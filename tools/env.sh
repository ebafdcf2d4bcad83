#!/bin/sh
# Makes the environment that the tools here run in, and puts it first on PATH. tools/test.sh and tools/demo.sh source this
# file; run by hand it only installs. A second run with nothing changed installs nothing.
#
#   KDA_TL_VENV    folder of the virtual environment (default: .venv in the checkout)
#   KDA_TL_TORCH   the torch to install, as pip takes it, e.g. "torch==2.13.0" on a machine with a GPU (default: a CPU build)
#   PYTHON         the interpreter that makes the environment (default: python3)

kda_tl_say() { printf 'tools/env.sh: %s\n' "$*" >&2; }

kda_tl_checkout() {
    checkout=$(CDPATH='' cd -- "$(dirname -- "$0")/.." 2>/dev/null && pwd) || checkout=
    [ -f "$checkout/tools/env.sh" ] || checkout=$(pwd) # sourced by an interactive shell
    [ -f "$checkout/tools/env.sh" ] || { kda_tl_say "run it from the root of the checkout"; return 1; }
}

kda_tl_compiler() {
    for compiler in ${CXX:+"$CXX"} g++ c++ clang++; do
        command -v "$compiler" >/dev/null 2>&1 && return 0
    done
    kda_tl_say "no C++ compiler (g++, c++ or clang++), which building artifacts needs. Install one:" \
        "apt-get install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora)"
    return 1
}

kda_tl_venv() {
    if "$python" -c '' 2>/dev/null; then
        "$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null
        return
    fi
    if [ -n "$(ls -A -- "$venv" 2>/dev/null)" ]; then
        kda_tl_say "$venv is in the way: it is no virtual environment with a working Python." \
            "Remove it, or name another folder with KDA_TL_VENV"
        return 1
    fi
    base=${PYTHON:-python3}
    found=$("$base" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null) || found="not a working Python"
    case $found in
        "Python 3.10" | "Python 3.11" | "Python 3.12" | "Python 3.13") ;;
        *)
            kda_tl_say "$base is $found; Python 3.10 to 3.13 is needed." \
                "Name one with PYTHON, e.g. PYTHON=python3.12 sh tools/test.sh"
            return 1
            ;;
    esac
    kda_tl_say "making $venv with $found"
    "$base" -m venv "$venv" || {
        rm -rf -- "$venv"
        kda_tl_say "$base cannot make a virtual environment: apt-get install python3-venv (Debian, Ubuntu)"
        return 1
    }
}

kda_tl_torch_version() { "$python" -c 'import torch; print(torch.__version__)' 2>/dev/null; }

# A CUDA build of torch brings gigabytes of libraries that nothing here uses without a GPU.
kda_tl_torch() {
    if [ -n "${KDA_TL_TORCH:-}" ]; then
        kda_tl_say "installing $KDA_TL_TORCH"
        "$python" -m pip install -q "$KDA_TL_TORCH"
        return
    fi
    kda_tl_torch_version >/dev/null && return 0
    kda_tl_say "installing torch (CPU build)"
    log=$venv/torch-install.log
    # The first serves where pip knows a source of CPU wheels; uv knows PyTorch's own by name.
    "$python" -m pip install -q "torch==2.13.0+cpu" >"$log" 2>&1 && return 0
    { "$python" -m pip install -q uv && "$python" -m uv pip install -q --python "$python" --torch-backend=cpu torch; } \
        >>"$log" 2>&1 && return 0
    cat "$log" >&2
    kda_tl_say "no CPU build of torch was found. Install torch into $venv yourself, or name one with KDA_TL_TORCH"
    return 1
}

kda_tl_install() {
    kda_tl_torch || return 1
    torch=$(kda_tl_torch_version) || { kda_tl_say "torch is installed in $venv but cannot be imported"; return 1; }
    kda_tl_say "installing the package and its tools next to torch $torch"
    printf 'torch==%s\n' "$torch" >"$venv/torch-constraint.txt"
    "$python" -m pip install -q -c "$venv/torch-constraint.txt" -e "$checkout[build,test]" || return 1
    [ "$(kda_tl_torch_version)" = "$torch" ] || { kda_tl_say "the installation replaced torch $torch"; return 1; }
}

kda_tl_env() {
    if [ "$(uname -s)" != Linux ]; then
        kda_tl_say "this is $(uname -s), and artifacts are Linux libraries: use a Linux machine, or a container"
        return 1
    fi
    kda_tl_checkout || return 1
    kda_tl_compiler || return 1
    venv=${KDA_TL_VENV:-$checkout/.venv}
    mkdir -p -- "$(dirname -- "$venv")" && venv=$(CDPATH='' cd -- "$(dirname -- "$venv")" && pwd)/$(basename -- "$venv")
    python=$venv/bin/python
    export PIP_DISABLE_PIP_VERSION_CHECK=1
    kda_tl_venv || return 1
    # An editable installation belongs to one checkout, hence the path.
    stamp="$("$python" -c 'import hashlib, sys; print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest())' \
        "$checkout/pyproject.toml") $checkout ${KDA_TL_TORCH:-}" || return 1
    if [ "$(cat "$venv/kda-tl-stamp" 2>/dev/null)" != "$stamp" ]; then
        rm -f "$venv/kda-tl-stamp"
        kda_tl_install || return 1
        printf '%s\n' "$stamp" >"$venv/kda-tl-stamp"
    fi
    VIRTUAL_ENV=$venv
    PATH=$venv/bin:$PATH
    export VIRTUAL_ENV PATH
}

# `return` for whoever sources this, `exit` for whoever runs it.
kda_tl_env || { return 1 2>/dev/null || exit 1; }
