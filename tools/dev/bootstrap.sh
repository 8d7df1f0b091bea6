#!/usr/bin/env bash
# Make the environment in $1: uv if present, else pip from requirements.lock (hash-locked export of uv.lock).
set -euo pipefail
venv=${1:?usage: bootstrap.sh VENV}
here=$(cd "$(dirname "$0")/../.." && pwd)
cd "$here"

usable() { "$1" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info < (3, 14)))' 2>/dev/null; }

candidates=(python3 python3.11 python3.12 python3.13)
if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
python=
for candidate in "${candidates[@]}"; do
  if command -v "$candidate" >/dev/null && usable "$candidate"; then
    python=$(command -v "$candidate")
    break
  fi
done
if [ -z "$python" ]; then
  found=$("${PYTHON:-python3}" -V 2>/dev/null || true)
  echo "tether: needs Python 3.11, 3.12 or 3.13, found ${found:-none}${PYTHON:+ as PYTHON=$PYTHON}; install one (Debian 12: apt-get install python3 python3-venv) or set PYTHON=/path/to/python3.11" >&2
  exit 1
fi

with=pip
if uv --version >/dev/null 2>&1; then with=uv; fi
echo "tether: making $venv with $("$python" -V) and $with (once; about a minute)" >&2

if [ "$with" = uv ]; then
  UV_PROJECT_ENVIRONMENT="$venv" uv sync --quiet --frozen --all-extras --all-groups --python "$python"
  exit 0
fi

# A venv that uv made has no pip.
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1 && ! "$python" -m venv --clear "$venv" 2>/dev/null; then
  rm -rf "$venv"
  echo "tether: $python cannot make a virtual environment; install its venv module (Debian 12: apt-get install python3-venv)" >&2
  exit 1
fi
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
