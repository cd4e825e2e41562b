#!/usr/bin/env bash
# A whole benchmark, spread over every GPU of the machine: each takes the next model when it is done with one.
#
#   scripts/bench_all.sh inference|training [FOLDER] [OPTION...]     options go to `nimble-jobs bench`; FOLDER: out/KIND
#
# Writes FOLDER/results.json and FOLDER/results.png. A second run goes on where the first ended. STOP=500 ends in so many
# seconds. DTYPES=fp16,fp32, MODELS=NAME[:BATCH],... and GPUS=0,1 choose what is measured, and where; for inference
# MODELS=all (the paper's twelve, if it is not set) and MODELS=more (ten others) stand for groups. With WARM=180 all
# models and the systems that compile, COMPILERS, are first prepared side by side for at most so many seconds, which
# leaves their code in the compilers' caches; measured is what follows, one model after another on each GPU. It wants
# --shared-caches.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:?inference or training}
folder=${2:-out/$kind}
shift "$(($# < 2 ? $# : 2))"
case $kind in  # the longest first
    inference)
        dtypes=${DTYPES:-fp16,fp32}
        compilers=${COMPILERS:-compile-default,ours}
        models=${MODELS:-all}
        models=${models/#all/nasnet_a_large,nasnet_a_mobile,amoebanet,darts,efficientnet_b5,inception_v3,bert_base,resnet101,googlenet,efficientnet_b0,resnet50,mobilenet_v2}
        models=${models/#more/pnasnet5large,hrnet_w18,coat_tiny,deeplabv3_resnet50,inception_v4,densenet121,mixnet_m,vit_base_patch16_224,shufflenet_v2_x1_0,squeezenet1_1} ;;
    training)
        dtypes=${DTYPES:-fp32}
        compilers=${COMPILERS:-compile-default,compile-reduce-overhead,ours}
        models=${MODELS:-nasnet_a_mobile,inception_v3,efficientnet_b0@32:32,efficientnet_b0@32:64,efficientnet_b0@32:128,mobilenet_v2@32:32,mobilenet_v2@32:64,mobilenet_v2@32:128,resnet50@32:32,resnet50@32:64,resnet50@32:128,resnet50,bert_base} ;;
    *) echo "bench_all: $kind is unknown; expected inference or training" >&2; exit 2 ;;
esac
IFS=, read -ra models <<<"$models"
mkdir -p "$folder"
IFS=, read -ra gpus <<<"${GPUS:-$(nvidia-smi --list-gpus | awk '{print NR - 1}' | paste -sd ,)}"
[ ${#gpus[@]} -gt 0 ] || { echo "bench_all: no GPU found" >&2; exit 1; }
bench() {  # NAME[:BATCH] OPTION...
    local name=$1 batch=()
    shift
    if [[ $name =~ ^(.+):([0-9]+)$ ]]; then
        name=${BASH_REMATCH[1]} batch=(--batch "${BASH_REMATCH[2]}")
    fi
    .venv/bin/nimble-jobs bench "$kind" --models "$name" "${batch[@]}" "$@"
}
if [ -n "${WARM:-}" ]; then
    for i in "${!models[@]}"; do
        for dtype in ${dtypes//,/ }; do
            for system in ${compilers//,/ }; do
                name=$folder/warm-$dtype-${models[i]//:/-}-$system
                # threads of so many processes would only wait for each other
                CUDA_VISIBLE_DEVICES=${gpus[i % ${#gpus[@]}]} OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 \
                    bench "${models[i]}" "$@" --dtype "$dtype" --systems "$system" --sample 1ms \
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
    local gpu=$1 i name stop resume failed=0
    shift
    while i=$(take) && [ "$i" -lt ${#models[@]} ]; do
        name=$folder/${models[i]//:/-} stop=() resume=()
        if [ -n "${STOP:-}" ]; then
            [ "$SECONDS" -lt "$STOP" ] || return 1
            stop=(--stop-after $((STOP - SECONDS)))
        fi
        [ ! -e "$name.json" ] || resume=(--resume)
        CUDA_VISIBLE_DEVICES=$gpu bench "${models[i]}" --dtype "$dtypes" "$@" "${stop[@]}" "${resume[@]}" \
            --json "$name.json" --log "$name.talk" >"$name.txt" 2>"$name.err" || failed=1
    done
    return "$failed"
}
for gpu in "${gpus[@]}"; do measure "$gpu" "$@" & done
failed=0
for job in $(jobs -p); do wait "$job" || failed=1; done
files=()
for name in "${models[@]//:/-}"; do [ ! -e "$folder/$name.json" ] || files+=("$folder/$name.json"); done
rm -f "$folder/results.json" "$folder/results.png"
[ ${#files[@]} -gt 0 ] || { echo "bench_all: nothing was measured" >&2; exit 1; }
.venv/bin/nimble-jobs bench show "${files[@]}" --json "$folder/results.json" --plot "$folder/results.png" || failed=1
exit "$failed"
