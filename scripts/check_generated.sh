#!/usr/bin/env bash
# Fails when the committed code generated from proto/ differs from what the pinned generator makes now.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
scripts/generate_proto.sh "$fresh"
for file in "$fresh"/pyps_wire/*; do
  if ! diff -u "client/pyps_wire/$(basename "$file")" "$file"; then
    echo "client/pyps_wire/$(basename "$file") is not what proto/ generates: run \`make proto\` and commit the result." >&2
    exit 1
  fi
done
for file in client/pyps_wire/*_pb2*; do
  if [ ! -e "$fresh/pyps_wire/$(basename "$file")" ]; then
    echo "$file is made of no file in proto/: remove it." >&2
    exit 1
  fi
done
echo "generated code is fresh"
