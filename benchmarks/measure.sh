#!/usr/bin/env bash
# Measures the figures of docs/scale.md on one GPU, a stage at a time:
#
#   benchmarks/measure.sh FOLDER [STAGE ...]
#
# Figures go to files of FOLDER, and what is printed to its measure.log, as soon as they are there.
# FOLDER/measured lists the commands that have ended well. These are not repeated: after an
# interruption, the same line goes on. Minutes are estimates, for an H200 with 16 cores.
set -uo pipefail
PYTHON=${PYTHON:-$(dirname "$0")/../.venv/bin/python}
STAGES="tests compile step-b kernels run step-h step-l evals suite saving parts own small"

stage() {
    case $1 in
    tests) # 5 min: what only a GPU can show
        local tests=$(dirname "$0")/../tests
        run "$PYTHON" -m pytest -v -n 6 --durations 8 -m "gpu and not slow" \
            "$tests/gpu" "$tests/evals/test_tracking.py" ;;
    compile) # 9 min, also beside `tests`; torch keeps it, which saves the other stages minutes
        local out=() preset
        for preset in vit_b16_stop vit_l16_stop vit_h14_stop; do # one by one: less memory
            once "$preset"
            once "$preset" --runtime.kernels fused
            once "$preset" --runtime.kernels fused --runtime.residual half
        done ;;
    step-b) # 5 min; 2 after `compile`
        step vit_b16_stop --rounds 20 --profile ;;
    kernels) # 5 min: each fused kernel alone, its error and its floor
        bench kernels --rounds 3 ;;
    run) # 4 min: a folder of JPEGs, with saves
        bench run --preset vit_b16_stop --runtime.kernels fused --runtime.save_every 250 ;;
    step-h) # 8 min; 2 after `compile`
        step vit_h14_stop --rounds 10 --profile ;;
    step-l) # 6 min; 2 after `compile`
        step vit_l16_stop --rounds 10 --profile ;;
    evals) # 4 min
        bench evals --parts memory tracking ;;
    suite) # 5 min
        bench evals --parts jpeg suite --rounds 1 ;;
    saving) # 3 min
        bench saving --preset vit_b16_stop ;;
    parts) # 4 min: a batch of the paper in parts, as graphs and without
        bench step --preset vit_b16_stop --masks published --no-twin --rounds 3 \
            --optim.batch_size 2048 --runtime.accumulate 8 --versus runtime.compile=on ;;
    own) # 8 min: the presets with masks of their own, and StoP beside its twin
        bench step --preset vit_b16_stop --rounds 40
        bench step --preset vit_l16_stop --rounds 10 --no-twin
        bench step --preset vit_h14_stop --rounds 10 --no-twin ;;
    small) # 3 min
        versus --preset small_images --rounds 20 --profile ;;
    esac
}

once() { bench step --preset "$1" --masks published --no-twin --rounds 1 "${@:2}"; }

step() { versus --preset "$1" --masks published "${@:2}"; }

# What docs/scale.md calls written, beside the preset as it is, in turn within one run.
versus() {
    bench step "$@" --no-twin \
        --versus runtime.kernels=fused runtime.kernels=fused,runtime.residual=half
}

bench() { run "$PYTHON" -m stopmim bench "$@" "${out[@]}"; }

run() {
    if grep -qxF -- "$*" "$folder/measured"; then
        echo "$(date +%T) measured before: $*"
        return
    fi
    echo "$(date +%T) $*"
    if "$@"; then echo "$*" >>"$folder/measured"; else failed="$failed $name"; fi
}

folder=${1:?usage: benchmarks/measure.sh FOLDER [STAGE ...], of: $STAGES}
names=${*:2}
for name in $names; do
    [[ " $STAGES " == *" $name "* ]] || { echo "no stage $name, but $STAGES" >&2; exit 2; }
done
mkdir -p "$folder" && touch "$folder/measured" || exit
out=(--out "$folder") failed=
export PYTHONUNBUFFERED=1
{
    for name in ${names:-$STAGES}; do stage "$name"; done
    [ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
} 2>&1 | tee -ia "$folder/measure.log"
