#!/usr/bin/env bash
# Whole scoring jobs on a GPU, from files to Parquet, beside hand-written loops and Ray Data. Each part takes less than
# ten minutes and writes JSON, PNG and log to FOLDER; what is measured is in the JSON at once.
#
#   scripts/gpu_scoring.sh images [FOLDER]     all systems once, files cached, with settings that are known to be good
#   scripts/gpu_scoring.sh uncached [FOLDER]   the same, files dropped from the page cache before each run
#   scripts/gpu_scoring.sh search [FOLDER]     the loops and Ray Data with every batch size and number of workers
#   scripts/gpu_scoring.sh npy [FOLDER]        jobs over arrays against the bare replay
#
# FOLDER is out/scoring unless given. Set in the environment:
#   PYTHON (python3)    SETTINGS ("SYSTEM=BATCH/WORKERS ...")    SYSTEMS (all)    ROUNDS (1)    COUNT (8192)
#   PHOTOS (photographs of scikit-image and scikit-learn)        MODELS (of npy)  LIMIT (for one process)
#   NIMBLE_JOBS_HOME (/tmp/nimble-jobs-scoring: JPEGs and schedules stay there for the next call)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
part=${1:-images}
folder=${2:-out/scoring}
mkdir -p "$folder"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export NIMBLE_JOBS_HOME="${NIMBLE_JOBS_HOME:-/tmp/nimble-jobs-scoring}"
unset PYTHONDONTWRITEBYTECODE  # all processes but the first find Python's modules compiled, whoever installed them how
export PYTHONPYCACHEPREFIX="${PYTHONPYCACHEPREFIX:-$NIMBLE_JOBS_HOME/bytecode}"
python=${PYTHON:-python3}
cores=$(nproc)
settings=${SETTINGS:-"ours-gpu-decode=64 ours-cpu-decode=64 dataloader-eager=128/$cores dataloader-compiled=128/$cores
    dataloader-torchvision=128/$cores gpu-decode=128/$((cores / 4)) ray-data=128/$cores"}
[ "$part" = npy ] && limit=420s || limit=240s  # a large search takes minutes
words=(--dtype fp16 --limit "${LIMIT:-$limit}" --rounds "${ROUNDS:-1}")
[ "$part" != search ] || SYSTEMS=${SYSTEMS:-loops,ray-data}
pictures=(--model resnet50 --count "${COUNT:-8192}" --systems "${SYSTEMS:-all}" ${PHOTOS:+--photos "$PHOTOS"})
case $part in
    images | uncached)
        words+=("${pictures[@]}")
        for setting in $settings; do words+=(--setting "$setting"); done
        [ "$part" = images ] || words+=(--uncached)
        ;;
    search)
        words+=("${pictures[@]}" --batch-sizes "${BATCHES:-64,128}")
        ;;
    npy)
        words+=(--format npy --count "${COUNT:-32768}" --batch-sizes "${BATCHES:-32}")
        words+=(--model "${MODELS:-resnet50,inception_v3,zoo:nasnet_a_mobile}")
        ;;
    *)
        echo "gpu_scoring: unknown part $part; expected images, uncached, search, npy" >&2
        exit 2
        ;;
esac
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
rm -f "$folder/scoring-$part.json"
"$python" -m nimble_jobs.cli.main bench scoring "${words[@]}" --json "$folder/scoring-$part.json" \
    --png "$folder/scoring-$part.png" >"$folder/scoring-$part.tsv" 2> >(tee "$folder/scoring-$part.log" >&2)
code=$?
cp "$(ls -t "$NIMBLE_JOBS_HOME"/logs/bench-*.log | head -n 1)" "$folder/scoring-$part.talk"
cut -f 1,2,4,5,7-16,18,19 "$folder/scoring-$part.tsv"
exit $code
