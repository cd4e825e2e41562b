#!/usr/bin/env bash
# A whole benchmark, spread over every GPU of the machine: one process a GPU at a time.
#
#   scripts/bench_all.sh inference|training [FOLDER] [OPTION...]     options go to `nimble-jobs bench`; FOLDER: out/KIND
#
# Writes FOLDER/results.json and FOLDER/results.png. A second run goes on where the first ended. STOP=8m ends in time.
# DTYPES=fp16,fp32 and MODELS=NAME,... choose what is measured. With WARM=3m all models and the systems that compile,
# COMPILERS, are first prepared side by side for at most so long, which leaves their code in the compilers' caches;
# measured is what follows, one model after another. It wants --shared-caches.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:?inference or training}
folder=${2:-out/$kind}
shift "$(($# < 2 ? $# : 2))"
case $kind in  # the longest first, dealt out in turn
    inference)
        dtypes=${DTYPES:-fp16,fp32}
        models=${MODELS:-nasnet_a_large,nasnet_a_mobile,amoebanet,darts,efficientnet_b5,inception_v3,bert_base,resnet101,googlenet,efficientnet_b0,resnet50,mobilenet_v2} ;;
    training)
        dtypes=${DTYPES:-fp32}
        models=${MODELS:-nasnet_a_mobile,inception_v3,efficientnet_b0@32,mobilenet_v2@32,resnet50@32,resnet50,bert_base} ;;
    *) echo "bench_all: $kind is unknown; expected inference or training" >&2; exit 2 ;;
esac
IFS=, read -ra models <<<"$models"
mkdir -p "$folder"
gpus=$(nvidia-smi --list-gpus | wc -l)
[ "$gpus" -gt 0 ] || { echo "bench_all: no GPU found" >&2; exit 1; }
bench=(.venv/bin/nimble-jobs bench "$kind")
if [ -n "${WARM:-}" ]; then
    compilers=${COMPILERS:-compile-default,ours}
    for i in "${!models[@]}"; do
        for dtype in ${dtypes//,/ }; do
            for system in ${compilers//,/ }; do
                name=$folder/warm-$dtype-${models[i]}-$system
                # threads of so many processes would only wait for each other
                CUDA_VISIBLE_DEVICES=$((i % gpus)) OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
                    "${bench[@]}" --models "${models[i]}" "$@" --dtype "$dtype" --systems "$system" --sample 1ms \
                    --stop-after "$WARM" --log "$name.talk" >/dev/null 2>"$name.err" &
            done
        done
    done
    wait
fi
stop=(${STOP:+--stop-after "$STOP"})
for ((gpu = 0; gpu < gpus; gpu++)); do
    mine=()
    for ((i = gpu; i < ${#models[@]}; i += gpus)); do mine+=("${models[i]}"); done
    [ ${#mine[@]} -gt 0 ] || continue
    resume=()
    [ ! -e "$folder/gpu-$gpu.json" ] || resume=(--resume)
    CUDA_VISIBLE_DEVICES=$gpu "${bench[@]}" --models "$(IFS=,; echo "${mine[*]}")" --dtype "$dtypes" "$@" \
        "${stop[@]}" "${resume[@]}" --json "$folder/gpu-$gpu.json" --log "$folder/gpu-$gpu.talk" \
        >"$folder/gpu-$gpu.txt" 2>"$folder/gpu-$gpu.err" &
done
failed=0
for job in $(jobs -p); do wait "$job" || failed=1; done
rm -f "$folder/results.json" "$folder/results.png"
.venv/bin/nimble-jobs bench show "$folder"/gpu-*.json --json "$folder/results.json" --plot "$folder/results.png" || failed=1
exit "$failed"
