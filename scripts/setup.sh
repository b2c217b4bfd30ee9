# Sourced by the other scripts: `setup core` or `setup dev` makes or reuses .venv and installs the
# package and the pinned versions. A stamp of pyproject.toml and constraints.txt makes reuse immediate.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3.14 python3; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "no Python 3.11 or newer with the venv module found: install one (Debian: python3-venv)" >&2
    return 1
}

setup() {
    local extra=$1 want stamp log
    want=$(cat pyproject.toml constraints.txt | cksum)
    stamp=.venv/.vlmbench-$extra
    if [[ -x .venv/bin/python ]] && [[ $(cat "$stamp" .venv/.vlmbench-dev 2>/dev/null) == *"$want"* ]]; then
        return
    fi
    if ! .venv/bin/python -c 'import pip' 2>/dev/null; then
        echo "making .venv" >&2
        "$(find_python)" -m venv --clear .venv
    fi
    echo "installing vlmbench ($extra) into .venv" >&2
    rm -f .venv/.vlmbench-*
    log=.venv/install.log
    local target=.
    [[ $extra == core ]] || target=".[$extra]"
    if ! .venv/bin/python -m pip install --quiet --editable "$target" --constraint constraints.txt >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        echo "installation failed: the whole log is in $log" >&2
        return 1
    fi
    echo "$want" >"$stamp"
}
