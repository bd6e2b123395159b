#!/usr/bin/env bash
# What this tool does on a GPU, measured beside the CPU: a table on stdout and a JSON file, within nine minutes.
#   tools/gpu.sh [options of tools/gpu.py]          sets up an environment of its own first
#   tools/gpu.sh --here [options of tools/gpu.py]   takes the Python that is active; PYTHON names another one
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = --here ]; then
  shift
  python=${PYTHON:-python3}
else
  source tools/environment.sh
  set_up .venv-test '.[dev]'
  python=.venv-test/bin/python
fi
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} exec "$python" tools/gpu.py "$@"
