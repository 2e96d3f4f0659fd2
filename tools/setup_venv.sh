#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the virtual environment VENV if it is missing and installs the project's dependencies into it, with the
# extras named. Installs again only when the list in pyproject.toml differs from the one installed last.
#
#   tools/setup_venv.sh VENV [EXTRA...]        PYTHON=... chooses the interpreter
set -euo pipefail

venv=${1:?usage: tools/setup_venv.sh VENV [EXTRA...]}
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."

minimum=$(sed -n 's/^requires-python = ">=\([0-9.]*\)"$/\1/p' pyproject.toml)
new_enough="import sys; sys.exit(sys.version_info < tuple(map(int, '$minimum'.split('.'))))"

die() {
    printf 'error: %s\n' "$1" >&2
    shift
    [[ $# -eq 0 ]] || printf '       %s\n' "$@" >&2
    exit 1
}

# A candidate may exist and still not run (a version manager's shim for a version that is not active): try each.
find_python() {
    local candidate
    for candidate in python3.12 python3.13 python3.14 python3 python; do
        if "$candidate" -c "$new_enough" >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    # pyenv may hold a fitting version that no shim reaches from here.
    if command -v pyenv >/dev/null 2>&1; then
        for candidate in "$(pyenv root)"/versions/3.*/bin/python3; do
            if "$candidate" -c "$new_enough" >/dev/null 2>&1; then
                printf '%s\n' "$candidate"
                return
            fi
        done
    fi
}

describe() {
    "$1" -c 'import platform, sys; print(platform.python_version(), "at", sys.executable)' 2>/dev/null \
        || printf '%s, which does not run' "$1"
}

if [[ ! -x $venv/bin/python ]]; then
    if [[ -n ${PYTHON:-} ]]; then
        python=$PYTHON
        "$python" -c "$new_enough" 2>/dev/null \
            || die "Python >= $minimum is needed, and PYTHON=$PYTHON is $(describe "$PYTHON")." \
                "Set PYTHON to a newer interpreter, for example: make PYTHON=python$minimum"
    else
        python=$(find_python)
        [[ -n $python ]] \
            || die "Python >= $minimum is needed; python3 here is $(describe python3)." \
                "Install Python $minimum or newer (system packages, pyenv, conda) and run the command again," \
                "or name the interpreter: make PYTHON=/path/to/python$minimum"
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null \
        || die "$(describe "$python") cannot make virtual environments: its venv or ensurepip module is missing." \
            "On Debian and Ubuntu these are in the package python$minimum-venv."
    printf 'Making the virtual environment %s with Python %s\n' "$venv" "$(describe "$python")"
    "$python" -m venv "$venv"
fi

"$venv/bin/python" -c "$new_enough" \
    || die "Python >= $minimum is needed, and the environment $venv has $(describe "$venv/bin/python")." \
        "Remove $venv, or choose another one with VENV=..., and run the command again."

# The requirements as pip reads them; the same list, kept beside the environment, says what is installed.
requirements=$("$venv/bin/python" - "$@" <<'PY'
import sys, tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = list(project["dependencies"])
for extra in sys.argv[1:]:
    wanted += project["optional-dependencies"][extra]
print("\n".join(wanted))
PY
)
name=$(printf '%s-' base "$@")
installed=$venv/requirements-${name%-}.txt

if [[ ! -f $installed || $(<"$installed") != "$requirements" ]]; then
    printf 'Installing into %s (PyTorch from the registry is several GB; this happens once)\n' "$venv"
    # An environment whose making was interrupted has an interpreter but no pip.
    "$venv/bin/python" -c 'import pip' 2>/dev/null || "$venv/bin/python" -m ensurepip
    "$venv/bin/python" -m pip --disable-pip-version-check install -r <(printf '%s\n' "$requirements")
    printf '%s\n' "$requirements" >"$installed"
fi
