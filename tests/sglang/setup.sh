#!/usr/bin/env bash
# Usage: setup.sh PYTHON FOLDER -- unpack SGLang's wheel in FOLDER, for tests/sglang (SGLANG_SOURCE=FOLDER).
# Its dependencies do not fit the torch of the tests, so that it is not installed; what its loaders import and
# the environment for vLLM lacks is put beside it.
set -euo pipefail

python="$1"
folder="$2"
version=0.5.23

[ -f "$folder/.complete-$version" ] && exit
rm -rf "$folder"
mkdir -p "$folder/wheel"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$folder/wheel" "sglang==$version"
"$python" -m zipfile -e "$folder/wheel"/sglang-*.whl "$folder"
rm -r "$folder/wheel"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" orjson
touch "$folder/.complete-$version"
