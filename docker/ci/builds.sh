# shellcheck shell=bash
# The builds. Sourced by test-containers.sh.

# build IMAGE ARGUMENTS…: buildah without a daemon or an index; the log is shown if it fails.
# HEALTHCHECK exists in the docker format only. Volumes and pip.conf are there during RUN and are not part of the image.
build() {
    local image=$1
    shift
    local log=$WORK/build-${image##*/}.log
    if ! buildah bud --isolation chroot --network host --format docker --pull-never --tag "$image" "$@" \
        >"$log" 2>&1; then
        tail -n 40 "$log"
        return 1
    fi
}

# build_image DOCKERFILE IMAGE BASE ARGUMENTS…: one of the project's Dockerfiles over a base that is here.
build_image() {
    local file=$1 image=$2 base=$3
    shift 3
    mkdir -p "$WORK/wheels"
    build "$image" --file "$ROOT/docker/Dockerfile.$file" \
        --volume "$WORK/wheels:/wheelhouse:ro" --volume "$WORK/pip.conf:/etc/pip.conf:ro" \
        --build-arg "BASE_IMAGE=$base" --build-arg BASE_DIGEST= ${LAYERS:+--layers} \
        --build-arg "REVISION=$REVISION" --build-arg "CREATED=$(date --utc +%Y-%m-%dT%H:%M:%SZ)" "$@" "$ROOT"
}

# refuse WHAT PATTERN COMMAND…: the build must fail, and for the reason that PATTERN describes.
refuse() {
    local what=$1 pattern=$2 output
    shift 2
    if output=$("$@"); then
        fail "the build went through although $what"
    fi
    grep -q -- "$pattern" <<<"$output" || fail "the build failed for another reason than that $what: $output"
    pass "the build is refused where $what: $(grep -m 1 -- "$pattern" <<<"$output")"
}

build_cpu() {
    say "CPU image"
    build_image cpu localhost/portamoe-cpu localhost/base || fail "Dockerfile.cpu"
    pass "Dockerfile.cpu built"
}

# make_stub NAME ARGUMENTS…: a base with a stub torch and, if $WORK/stub-NAME/rootfs exists, those files.
make_stub() {
    local name=$1 context=$WORK/stub-$1
    shift
    mkdir -p "$context/rootfs"
    cp "$CI/stub/make_stub.py" "$CI/stub/Dockerfile" "$context/"
    build "localhost/stub-$name" --build-arg BASE=localhost/base --build-arg "STUB=$(printf '%q ' "$@")" "$context" || fail "stub $name"
}

# same_torch IMAGE STUB: torch and Triton are in the image, byte for byte, and nothing replaced them.
same_torch() {
    local image=$1 stub=$2 list='cd /opt/venv/lib/python3*/site-packages && find torch* *triton* -type f ! -name "*.pyc" -exec sha256sum {} +'
    local before after
    before=$(contained "localhost/$stub" sh -c "$list" | sort)
    after=$(contained "localhost/$image" sh -c "$list" | sort)
    [[ $(wc -l <<<"$before") -gt 3 ]] || fail "the stub $stub has no torch: $before"
    [[ $before == "$after" ]] || fail "torch or Triton of the base changed: $(diff <(echo "$before") <(echo "$after"))"
    pass "$image: $(wc -l <<<"$after") files of the base's torch and Triton are unchanged"
}

# The builds over stubs repeat each other's steps, and their layers are small.
LAYERS=

build_rocm() {
    LAYERS=yes
    say "ROCm image over a stub base"
    make_stub rocm --torch 2.9.1+rocm6.4 --triton-name pytorch-triton-rocm --hip 6.4.43484 --archs 'gfx90a:xnack- gfx942'
    build_image rocm localhost/portamoe-rocm-install localhost/stub-rocm --target install || fail "Dockerfile.rocm, install"
    build_image rocm localhost/portamoe-rocm localhost/stub-rocm || fail "Dockerfile.rocm"
    same_torch portamoe-rocm-install stub-rocm
    same_torch portamoe-rocm stub-rocm
    check_image portamoe-rocm
    probe_image portamoe-rocm
    equals PYTORCH_ROCM_ARCH "$(run_image portamoe-rocm printenv PYTORCH_ROCM_ARCH)" gfx90a
    refuse "torch has no code for ROCM_ARCH" 'has no code for gfx950' \
        build_image rocm localhost/refused localhost/stub-rocm --build-arg 'ROCM_ARCH=gfx90a;gfx950'
    make_stub no-torch --triton-name pytorch-triton-rocm
    refuse "the base has no torch" 'this base has no torch' build_image rocm localhost/refused localhost/stub-no-torch
}

build_cuda() {
    LAYERS=yes
    say "CUDA image over a stub base"
    local folder=$WORK/stub-cuda/rootfs/usr/local/cuda/bin
    mkdir -p "$folder"
    python3 -m zipfile --extract "$WORK"/nvcc/*.whl "$WORK/nvcc"
    install -m 0755 "$WORK"/nvcc/nvidia/cu1*/bin/ptxas "$folder/"
    make_stub cuda --torch 2.14.1+cu132 --triton-name triton --cuda 13.2 --archs 'sm_80 sm_90 sm_100 sm_120 compute_120'
    build_image cuda localhost/portamoe-cuda-install localhost/stub-cuda --target install || fail "Dockerfile.cuda, install"
    build_image cuda localhost/portamoe-cuda localhost/stub-cuda || fail "Dockerfile.cuda"
    same_torch portamoe-cuda-install stub-cuda
    same_torch portamoe-cuda stub-cuda
    check_image portamoe-cuda
    probe_image portamoe-cuda
    equals "Triton's two variables" "$(run_image portamoe-cuda printenv TRITON_PTXAS_PATH TRITON_PTXAS_BLACKWELL_PATH)" \
        $'/usr/local/cuda/bin/ptxas\n/usr/local/cuda/bin/ptxas'
    # Laid over the stub's files, so that the steps before the check need not run again.
    printf 'def _cuda_getArchFlags():\n    return "sm_90a sm_100a sm_120 compute_120"\n' >"$WORK/_C.py"
    refuse "a 10.7 device can load nothing of torch" 'can load nothing of torch' \
        build_image cuda localhost/refused localhost/stub-cuda \
        --volume "$WORK/_C.py:/opt/venv/lib/python$BASE_PYTHON/site-packages/torch/_C.py:ro"
    printf '#!/bin/sh\necho "release 13.3, not defined for option gpu-name"\nexit 1\n' >"$WORK/ptxas"
    chmod 0755 "$WORK/ptxas"
    refuse "ptxas does not know sm_107" 'does not assemble for sm_107' \
        build_image cuda localhost/refused localhost/stub-cuda --volume "$WORK/ptxas:/usr/local/cuda/bin/ptxas:ro"
}
