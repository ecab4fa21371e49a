#!/bin/sh
# Builds llama-cpp-python (with the llama.cpp in it) from source into an environment of its own, for benchmarks/gguf_llama.py,
# which checks what `z2a export --to gguf` writes. Takes 20 to 50 minutes, so neither `make test` nor CI does it; it is
# compiled with -O1, since a check needs no speed. Safe to repeat: an environment that works is left as it is.
#     sh scripts/build_llama_cpp.sh FOLDER [VERSION]         JOBS=4 (default 2) and PYTHON=python3.12 in the environment
set -eu
folder=${1:-}
version=${2:-0.3.36}
python=${PYTHON:-python3}
refuse() {
    echo "$*" >&2
    exit 2
}

[ -n "$folder" ] || refuse "Name the folder of the new environment: sh scripts/build_llama_cpp.sh FOLDER [VERSION]"
if [ -x "$folder/bin/python" ] && "$folder/bin/python" -c "import llama_cpp; assert llama_cpp.__version__ == '$version'" 2>/dev/null; then
    echo "$folder has llama-cpp-python $version already"
    exit 0
fi
[ ! -e "$folder" ] || [ -x "$folder/bin/python" ] || [ -z "$(ls -A "$folder")" ] ||
    refuse "$folder is there and is no Python environment. Name another folder, or delete it."
for tool in "$python" c++ make; do
    command -v "$tool" >/dev/null 2>&1 ||
        refuse "No $tool was found. Debian/Ubuntu: apt-get install python3 python3-venv build-essential. Or set PYTHON."
done
mkdir -p "$folder"
free=$(df -Pk "$folder" | awk 'NR == 2 {print $4}')
[ "$free" -gt 3000000 ] || refuse "$folder has $((free / 1024)) MB free; the build needs 3 GB. Name a folder on another disk."

echo "Building llama-cpp-python $version in $folder (20 to 50 minutes); the log is $folder/build.log"
"$python" -m venv "$folder" || refuse "$python could not make an environment. Debian/Ubuntu: apt-get install python3-venv."
export CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF -DCMAKE_CXX_FLAGS_RELEASE='-O1 -DNDEBUG'"
export CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-2}"
if ! "$folder/bin/pip" install --verbose --no-binary llama-cpp-python "llama-cpp-python==$version" >"$folder/build.log" 2>&1; then
    tail -n 20 "$folder/build.log" >&2
    refuse "The build failed (above: the end of $folder/build.log). Without a network, give pip the sources with PIP_FIND_LINKS."
fi
"$folder/bin/python" -c "import llama_cpp; print('llama-cpp-python', llama_cpp.__version__, 'works')"
