#!/bin/sh
# Builds the native code with the address and undefined-behaviour sanitizers and runs its C++ tests.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build/sanitize
cmake -S "$root" -B "$build" -DPYPS_BINDINGS=OFF -DPYPS_TESTS=ON -DPYPS_SANITIZE=ON -DPYPS_WERROR=ON >/dev/null
cmake --build "$build" --parallel 2
ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 "$build/native_tests"
