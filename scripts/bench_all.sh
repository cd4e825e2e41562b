#!/usr/bin/env bash
# A whole benchmark, spread over every GPU of the machine: each takes the next model when it is done with one.
#
#   scripts/bench_all.sh inference|training [FOLDER] [OPTION...]     options go to `nimble-jobs bench`; FOLDER: out/KIND
#
# Writes FOLDER/results.json and FOLDER/results.png. A second run goes on where the first ended. STOP=500 ends in so many
# seconds. DTYPES=fp16,fp32 and MODELS=NAME,... choose what is measured. With WARM=180 all models and the systems that
# compile, COMPILERS, are first prepared side by side for at most so many seconds, which leaves their code in the
# compilers' caches; measured is what follows, one model after another on each GPU. It wants --shared-caches.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:?inference or training}
folder=${2:-out/$kind}
shift "$(($# < 2 ? $# : 2))"
case $kind in  # the longest first
    inference)
        dtypes=${DTYPES:-fp16,fp32}
        compilers=${COMPILERS:-compile-default,ours}
        models=${MODELS:-nasnet_a_large,nasnet_a_mobile,amoebanet,darts,efficientnet_b5,inception_v3,bert_base,resnet101,googlenet,efficientnet_b0,resnet50,mobilenet_v2} ;;
    training)
        dtypes=${DTYPES:-fp32}
        compilers=${COMPILERS:-compile-default,compile-reduce-overhead,ours}
        models=${MODELS:-nasnet_a_mobile,inception_v3,efficientnet_b0@32,mobilenet_v2@32,resnet50@32,resnet50,bert_base} ;;
    *) echo "bench_all: $kind is unknown; expected inference or training" >&2; exit 2 ;;
esac
IFS=, read -ra models <<<"$models"
mkdir -p "$folder"
gpus=$(nvidia-smi --list-gpus | wc -l)
[ "$gpus" -gt 0 ] || { echo "bench_all: no GPU found" >&2; exit 1; }
bench=(.venv/bin/nimble-jobs bench "$kind")
if [ -n "${WARM:-}" ]; then
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
next=$folder/next
echo 0 >"$next"
take() {  # the place of the next model in the list, each given once
    local i
    { flock 9; i=$(<"$next"); echo $((i + 1)) >"$next"; } 9>"$next.lock"
    echo "$i"
}
measure() {  # GPU OPTION...; fails where a benchmark fails, or time is over
    local gpu=$1 i model stop resume failed=0
    shift
    while i=$(take) && [ "$i" -lt ${#models[@]} ]; do
        model=${models[i]} stop=() resume=()
        if [ -n "${STOP:-}" ]; then
            [ "$SECONDS" -lt "$STOP" ] || return 1
            stop=(--stop-after $((STOP - SECONDS)))
        fi
        [ ! -e "$folder/$model.json" ] || resume=(--resume)
        CUDA_VISIBLE_DEVICES=$gpu "${bench[@]}" --models "$model" --dtype "$dtypes" "$@" "${stop[@]}" "${resume[@]}" \
            --json "$folder/$model.json" --log "$folder/$model.talk" >"$folder/$model.txt" 2>"$folder/$model.err" || failed=1
    done
    return "$failed"
}
for ((gpu = 0; gpu < gpus; gpu++)); do measure "$gpu" "$@" & done
failed=0
for job in $(jobs -p); do wait "$job" || failed=1; done
files=()
for model in "${models[@]}"; do [ ! -e "$folder/$model.json" ] || files+=("$folder/$model.json"); done
rm -f "$folder/results.json" "$folder/results.png"
[ ${#files[@]} -gt 0 ] || { echo "bench_all: nothing was measured" >&2; exit 1; }
.venv/bin/nimble-jobs bench show "${files[@]}" --json "$folder/results.json" --plot "$folder/results.png" || failed=1
exit "$failed"
