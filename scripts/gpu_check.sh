#!/usr/bin/env bash
# Everything that needs a GPU: the tests of tests/gpu, the quick start, scoring jobs on random images. Short lines last.
#
#   scripts/gpu_check.sh [FOLDER]      figures go to FOLDER as JSON (default: out/gpu)
#
# OFFLINE=1 uses the packages that python3 has already.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-out/gpu}
mkdir -p "$folder"
scripts/setup dev || exit 1
python=.venv/bin/python
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
failed=0
$python -m pytest -q tests/gpu -p no:cacheprovider --no-header --durations=5 >"$folder/tests.log" 2>&1 || failed=1
for turn in first second; do
    scripts/quickstart >"$folder/quickstart-$turn.log" 2>&1 || failed=1
done
$python scripts/measure_run.py --json "$folder/run-fp16-batch1.json" >"$folder/run.log" 2>"$folder/run.err" || failed=1
tail -n 1 "$folder/tests.log"
for turn in first second; do sed -n '/^job /,$p' "$folder/quickstart-$turn.log"; done
cat "$folder/run.log"
[ "$failed" = 0 ] && echo "gpu_check: all passed" || { echo "gpu_check: FAILED, see $folder"; exit 1; }
