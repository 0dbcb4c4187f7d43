#!/bin/bash
# Starts every image. Without arguments: `portamoe probe capabilities`. A portamoe command or option as the first word is
# given to portamoe; anything else is a program of the image (`python script.py`, `bash`).
#
# Images run with any UID, with a read-only root and under SingularityCE, which ignores USER and mounts the caller's home.
# So HOME gets a fallback, and caches go to a private folder on the node's own disk: MIOpen's file locks fail on Lustre, and
# many ranks writing one cache on a shared file system slow it down for everybody. Variables that are set stay as they are.
set -euo pipefail

say() {
    printf 'entrypoint: %s\n' "$*" >&2
}

# Print a folder of this user alone on node-local storage; fail where nothing is writable.
scratch_folder() {
    local parent folder
    for parent in "${TMPDIR:-}" /tmp /dev/shm; do
        [[ -n $parent && -d $parent && -w $parent ]] || continue
        folder=$parent/portamoe-$(id -u)
        # /tmp is shared: a folder or link that somebody else put there is not used.
        if mkdir -m 700 "$folder" 2>/dev/null || [[ -d $folder && ! -L $folder && -O $folder && -w $folder ]]; then
            printf '%s\n' "$folder"
            return
        fi
        if mktemp -d "$folder-XXXXXX" 2>/dev/null; then
            return
        fi
    done
    return 1
}

# default_folder NAME FOLDER: export NAME=FOLDER and create the folder, unless the user set NAME.
default_folder() {
    [[ -z ${!1+set} ]] || return 0
    if mkdir -p "$2" 2>/dev/null; then
        export "$1=$2"
    else
        say "cannot create $2, so $1 stays unset"
    fi
}

home_is_usable() {
    [[ -n ${HOME:-} && $HOME != / && -d $HOME && -w $HOME ]]
}

set_folders() {
    local scratch
    if ! scratch=$(scratch_folder); then
        say "no writable folder (TMPDIR, /tmp, /dev/shm): compilers and libraries may fail to write their caches;" \
            "add --tmpfs /tmp"
        return
    fi
    if ! home_is_usable; then
        mkdir -p "$scratch/home"
        export HOME=$scratch/home
    fi
    default_folder PORTAMOE_CACHE_DIR "$scratch/portamoe"
    default_folder TRITON_CACHE_DIR "$scratch/triton"
    default_folder TORCHINDUCTOR_CACHE_DIR "$scratch/inductor"
    default_folder MIOPEN_USER_DB_PATH "$scratch/miopen"
    default_folder MIOPEN_CUSTOM_CACHE_DIR "$scratch/miopen"
}

# Libraries ask for the user's name (getpass.getuser) and fail for a UID that /etc/passwd does not list.
set_user() {
    if ! id -un >/dev/null 2>&1; then
        export USER="${USER:-uid$(id -u)}"
        export LOGNAME="${LOGNAME:-$USER}"
    fi
}

# Opening is the test: permission bits say nothing about a device that the cgroup denies.
check_kfd() {
    if [[ -e /dev/kfd ]] && ! (: <>/dev/kfd) 2>/dev/null; then
        say "/dev/kfd is there, but UID $(id -u) cannot open it, so no AMD GPU can be used." \
            "The device belongs to group $(stat -c '%g (%G)' /dev/kfd)." \
            "docker: --device /dev/kfd --device /dev/dri --group-add $(stat -c %g /dev/kfd);" \
            "podman: the devices and --group-add keep-groups; Slurm: request a GPU (--gpus-per-node)"
    fi
}

set_folders
set_user
check_kfd

if (($# == 0)); then
    set -- probe capabilities
fi
case $1 in
    probe | run | verify | bench | -*) set -- portamoe "$@" ;;
esac
if ! command -v -- "$1" >/dev/null; then
    say "$1 is neither a portamoe command nor a program of this image; try --help"
    exit 127
fi
exec "$@"
