# shellcheck shell=bash
# set_up FOLDER REQUIREMENT [CONSTRAINTS]: a virtual environment with this package in it, made anew when what it holds
# would differ.

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Python 3.11 or later is needed; set PYTHON to one" >&2
  return 1
}

set_up() {
  local folder=$1 requirement=$2 constraints=${3:-constraints.txt} python stamp
  python=$(find_python)
  stamp=$(cat pyproject.toml "$constraints" | cksum)
  if [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
  echo "setting up $folder (once; a few minutes)" >&2
  rm -rf "$folder"
  "$python" -m venv "$folder"
  # torch first and by its exact version, so that nothing else pulls in another build of it.
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$(grep '^torch==' "$constraints")"
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" -e "$requirement"
  echo "$stamp" >"$folder/.stamp"
}
