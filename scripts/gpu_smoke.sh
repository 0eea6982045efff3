#!/usr/bin/env bash
# Megatron training, weight updates and SGLang generation on one GPU, each compared with a CPU reference in fp32.
# Needs requirements/gpu.txt (see docs/gpu.md). Arguments are passed to scripts/gpu_smoke.py: --platform cpu, --dtype fp32.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=python3
export RAY_USAGE_STATS_ENABLED=0 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONPATH=.
exec timeout --kill-after=30 1200 "$python" scripts/gpu_smoke.py "$@"
