#!/usr/bin/env bash
# Everything that needs a GPU: the tests of tests/gpu, the quick start, scoring jobs, benchmarks. Short lines last.
#
#   scripts/gpu_check.sh [FOLDER]      figures go to FOLDER as JSON (default: out/gpu)
#
# MODELS and STEPS name what is benchmarked (inference and training; empty: nothing), with commas between. All twelve
# models take an hour. OFFLINE=1 uses the packages that python3 has already.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-out/gpu}
mkdir -p "$folder"
scripts/setup dev || exit 1
python=.venv/bin/python
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
failed=0
for file in tests/gpu/test_*.py; do  # side by side: they compile more than they compute
    $python -m pytest -q "$file" -p no:cacheprovider --no-header --durations=5 >"$folder/$(basename "$file" .py).log" 2>&1 &
done
for job in $(jobs -p); do wait "$job" || failed=1; done
for turn in first second; do
    scripts/quickstart >"$folder/quickstart-$turn.log" 2>&1 || failed=1
done
$python scripts/measure_run.py --json "$folder/run-fp16-batch1.json" >"$folder/run.log" 2>"$folder/run.err" || failed=1
models=${MODELS-googlenet,resnet50}
steps=${STEPS-mobilenet_v2}
common=(--shared-caches --sample 300ms)
[ -z "$models" ] || .venv/bin/nimble-jobs bench inference --models "$models" --dtype fp16 --fuse auto "${common[@]}" \
    --systems eager,cuda-graph,compile-default,ours --json "$folder/inference.json" \
    --log "$folder/inference.talk" >"$folder/inference.log" 2>"$folder/inference.err" || failed=1
[ -z "$steps" ] || .venv/bin/nimble-jobs bench training --models "$steps" --batch 32 --layout contiguous "${common[@]}" \
    --systems eager,cuda-graph,compile-reduce-overhead,ours --json "$folder/training.json" \
    --log "$folder/training.talk" >"$folder/training.log" 2>"$folder/training.err" || failed=1
$python scripts/bench_start.py --device cuda --dtype fp16 --models resnet50 --json "$folder/start.json" \
    >"$folder/start.log" 2>"$folder/start.err" || failed=1
tail -qn 1 "$folder"/test_*.log
for turn in first second; do sed -n '/^job /,$p' "$folder/quickstart-$turn.log"; done
cat "$folder/run.log" "$folder/start.log"
for kind in inference training; do [ ! -e "$folder/$kind.log" ] || cut -f 1-7 "$folder/$kind.log"; done
[ "$failed" = 0 ] && echo "gpu_check: all passed" || { echo "gpu_check: FAILED, see $folder"; exit 1; }
