#!/usr/bin/env bash
# Measurements on a GPU that is lent for minutes: parts with time limits of their own, whose lines are printed as each ends.
#
#   scripts/gpu_parts.sh FOLDER PART:SECONDS[@GPU][+PART:SECONDS[@GPU]...] ...
#   scripts/gpu_parts.sh out/parts ranks:150 text:240@1+inference:240@0 scoring:115@0+resident:100@1 run:45 tests:120
#
# Parts that are joined by + run side by side, each on its GPU. Whatever a part wrote by the end of its time is in FOLDER.
#   tests      all of tests/gpu, one file after another (TESTS names other files)
#   inference  MODELS (default: the paper's twelve) in fp16 with `torch.compile` default and ours
#   ranks      a fine-tuning on two GPUs beside one (MODELS, default resnet50)   devices    a scoring job on two GPUs beside one
#   text       MiniLM and BERT-base over 100,000 texts      scoring    ours and the best loop over JPEGs
#   resident   small jobs of one worker                     run        a stored `run` and its phases
#   text-start fresh processes with stored buckets          text-training  BERT-base, ours and torch.compile's best mode
# Set in the environment: PYTHON (python3; must have nimble-jobs' packages), MODELS, TESTS, TEXTS (minilm,bert-base), BUCKETS (20, of text-start).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
folder=${1:?a folder}
shift
mkdir -p "$folder"
folder=$(realpath "$folder")
export PYTHON="${PYTHON:-python3}" PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-${TMPDIR:-/tmp}/nimble-jobs-compiled}"  # each process would compile modules anew
unset PYTHONDONTWRITEBYTECODE
[ -e .venv/bin/nimble-jobs ] || OFFLINE=1 scripts/setup  # over the packages that are there

part() {  # NAME SECONDS: measure it
    local out=$folder/$1
    case $1 in
        tests)
            local file
            for file in ${TESTS:-tests/gpu/test_*.py}; do
                echo "$file: $("$PYTHON" -m pytest -q "$file" -p no:cacheprovider -p no:benchmark 2>&1 | tee "$out-$(basename "$file").log" | tail -1)"
            done ;;
        inference)
            GPUS=${CUDA_VISIBLE_DEVICES:-0} DTYPES=fp16 WARM=$(($2 * 3 / 10)) STOP=$(($2 - 15)) COMPILERS=compile-default,ours \
                scripts/bench_all.sh inference "$out" --fuse auto --shared-caches --sample 300ms --systems compile-default,ours ;;
        ranks) "$PYTHON" scripts/bench_ranks.py --models "${MODELS:-resnet50}" --on-miss eager,build --fuse off --steps 64 ;;
        devices) "$PYTHON" scripts/bench_devices.py --json "$out.json" ;;
        text)
            "$PYTHON" -m nimble_jobs.cli.main bench text --models "${TEXTS:-minilm}" --count 100000 --rounds 1 --batch-sizes 256 \
                --compile-modes default --systems ours-empty-store,ours-stored,sentence-transformers,compiled-sorted \
                --limit "$(($2 / 3))s" --json "$out.json" ;;
        text-start) "$PYTHON" scripts/measure_text_start.py --buckets "${BUCKETS:-20}" --rounds 1 --phases --json "$out.json" ;;
        text-training)
            "$PYTHON" scripts/bench_training_text.py --systems ours,compile-reduce-overhead --batches 100 --texts 2000 --json "$out.json" ;;
        scoring)
            COUNT=16384 ROUNDS=2 LIMIT=60s SYSTEMS=ours-gpu-decode,gpu-decode SETTINGS="ours-gpu-decode=64 gpu-decode=256/2" \
                scripts/gpu_scoring.sh images "$out" ;;
        resident) "$PYTHON" scripts/bench_resident.py --jobs 100 --fresh 1 --dtype fp16 --device cuda --phases --json "$out.json" ;;
        run) "$PYTHON" scripts/measure_run.py resnet50 --batch 64 --records 8192 --phases --json "$out.json" ;;
        *) echo "gpu_parts: unknown part $1"; return 2 ;;
    esac
}

export -f part
export folder
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
for group in "$@"; do
    IFS=+ read -ra together <<<"$group"
    for each in "${together[@]}"; do
        IFS=:@ read -r name seconds gpu <<<"$each"
        (
            [ -z "$gpu" ] || export CUDA_VISIBLE_DEVICES=$gpu
            timeout -k 10 "$seconds" bash -c 'part "$@"' part "$name" "$seconds" >"$folder/$name.log" 2>&1
            code=$?
            # one write, so that lines of two parts do not mix
            printf '%s\n' "== $name: exit $code after $SECONDS s$(printf '\n%s' "$(tail -n 40 "$folder/$name.log" | cut -c 1-400)")"
        ) &
    done
    wait
done
