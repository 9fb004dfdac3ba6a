#!/usr/bin/env bash
# Builds llama-cpp-python into the given virtual environment: only the library, with one line mended.
# gcc 12 tells the optimiser of 8 of the 64 bytes that `_tile_loadconfig` reads, so it drops the stores of the rest and
# the quantised formats die with SIGILL on CPUs with AMX; the added line says that all of it is read.
set -euo pipefail
python=$1/bin/python version=0.3.36
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip install --quiet scikit-build-core
"$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation -d "$work" "llama-cpp-python==$version"
tar -xzf "$work"/*.tar.gz -C "$work"
source=$work/llama_cpp_python-$version
sed -i 's|^\( *\)_tile_loadconfig(&tc);|\1asm volatile("" :: "m"(tc) : "memory");\n&|' \
  "$source/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"
sed -i 's/set(LLAMA_BUILD_COMMON ON/set(LLAMA_BUILD_COMMON OFF/' "$source/CMakeLists.txt"
for part in LLAVA_BUILD LLAMA_BUILD_TOOLS LLAMA_BUILD_EXAMPLES LLAMA_BUILD_TESTS LLAMA_BUILD_SERVER; do
  CMAKE_ARGS="${CMAKE_ARGS:-} -D$part=OFF"
done
export CMAKE_ARGS
echo 'building llama.cpp (once; some minutes)'
"$python" -m pip install --quiet "$source"
"$python" -m pip install --quiet gguf
