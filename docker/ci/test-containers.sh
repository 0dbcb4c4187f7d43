#!/bin/bash
# Lints the three Dockerfiles and the scripts, builds all three without a container daemon or an image registry, and runs
# the CPU image through its entrypoint. Needs root, a Debian or Ubuntu with apt, and a package index for pip.
#
# The base of every build is a Debian that mmdebstrap makes from this host's apt sources. The CPU image gets a real torch;
# the ROCm and CUDA ones get a stub (stub/make_stub.py), which proves that a base's torch stays as it is. Packages for the
# builds are downloaded by the host's pip, so that its configuration applies, and given to the builds as a folder.
# PORTAMOE_CI_CACHE keeps the base between runs (default: ~/.cache/portamoe-ci); it is rebuilt where absent.
set -euo pipefail
export LC_ALL=C

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CI=$ROOT/docker/ci
CACHE=${PORTAMOE_CI_CACHE:-${HOME:-/root}/.cache/portamoe-ci}

say() {
    printf '== [%4d s] %s\n' "$SECONDS" "$*"
}

fail() {
    printf 'test-containers: FAILED: %s\n' "$*" >&2
    exit 1
}

# pass WHAT: one line for each thing that was shown to work.
pass() {
    printf '   ok: %s\n' "$*"
}

[[ $(id -u) == 0 ]] || fail "needs root: buildah and podman run without a daemon here, and apt installs them"

REVISION=$(git -C "$ROOT" rev-parse HEAD 2>/dev/null) || REVISION=unknown
WORK=$(mktemp -d /var/tmp/portamoe-containers.XXXXXX)

# shellcheck source=docker/ci/tools.sh
. "$CI/tools.sh"
# shellcheck source=docker/ci/builds.sh
. "$CI/builds.sh"
# shellcheck source=docker/ci/runs.sh
. "$CI/runs.sh"

trap clean_up EXIT

install_tools
lint
make_base_and_wheels
build_cpu
inspect_cpu
run_cpu
build_rocm
build_cuda
say "test-containers passed"
