#!/usr/bin/env bash
# Generates client/pyps_wire/*_pb2* from proto/ with the pinned generator, whose output loads under protobuf 5, 6 and 7.
# The generator needs an old protobuf and so has an environment of its own.
#   scripts/generate_proto.sh [OUTPUT_FOLDER]     default: client
set -euo pipefail
cd "$(dirname "$0")/.."
output=${1:-client}
environment=.envs/proto
if [ ! -x "$environment/bin/python" ] || ! "$environment/bin/python" -c 'import grpc_tools' 2>/dev/null; then
  "${PYTHON:-python3}" -m venv "$environment"
  "$environment/bin/pip" install --quiet 'grpcio-tools==1.62.3' 'setuptools<80'
fi
mkdir -p "$output/pyps_wire"
"$environment/bin/python" -m grpc_tools.protoc -Iproto \
  --python_out="$output" --pyi_out="$output" proto/pyps_wire/*.proto
