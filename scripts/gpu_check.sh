#!/usr/bin/env bash
# Runs one check of a machine's GPUs: gpu_first, gpu_smoke or two_gpus. Further arguments are those of scripts/NAME.py.
# gpu_smoke and two_gpus need SGLang (see docs/gpu.md).
set -euo pipefail
cd "$(dirname "$0")/.."
name=${1:-}
case "$name" in
  gpu_first | gpu_smoke | two_gpus) ;;
  *) echo "usage: scripts/gpu_check.sh gpu_first | gpu_smoke | two_gpus [arguments of scripts/NAME.py]" >&2; exit 2 ;;
esac
python=.venv/bin/python
[ -x "$python" ] || python=python3
export PYTHONWARNINGS=ignore::FutureWarning RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec timeout --kill-after=30 1200 "$python" -m "scripts.$name" "${@:2}"
