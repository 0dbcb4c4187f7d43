# shellcheck shell=bash
# Running and inspecting images. Sourced by test-containers.sh.

# contained [PODMAN FLAGS…] IMAGE COMMAND…: podman without a daemon, systemd or cgroup rights. The limits are named because
# the defaults need CAP_SYS_RESOURCE. `--entrypoint ''` runs a command of an image that is not the project's.
contained() {
    podman --cgroup-manager=cgroupfs --events-backend=none run --runtime runc --rm --network none \
        --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 --no-healthcheck --pull=never --entrypoint '' "$@"
}

# run_image IMAGE ARGUMENTS…: through the image's own entrypoint, as strict as it gets. FLAGS adds podman flags.
FLAGS=()
run_image() {
    local image=$1
    shift
    podman --cgroup-manager=cgroupfs --events-backend=none run --runtime runc --rm --network none \
        --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 --no-healthcheck --pull=never \
        --read-only --cap-drop=all --security-opt=no-new-privileges "${FLAGS[@]}" "localhost/$image" "$@"
}

# inspected IMAGE TEMPLATE: a field of the image's configuration.
inspected() {
    podman image inspect --format "$2" "localhost/$1"
}

# equals WHAT GOT WANTED
equals() {
    [[ $2 == "$3" ]] || fail "$1: got '$2', expected '$3'"
}

# check_image IMAGE: user, entrypoint, health check and labels.
check_image() {
    local image=$1 label value
    equals "$image: user" "$(inspected "$image" '{{.User}}')" 10001:10001
    equals "$image: entrypoint" "$(inspected "$image" '{{json .Config.Entrypoint}}')" '["/opt/portamoe/entrypoint.sh"]'
    [[ $(inspected "$image" '{{json .HealthCheck}}') == *probe* ]] || fail "$image: no health check"
    for label in title description licenses version revision created base.name base.digest; do
        value=$(inspected "$image" '{{json .Labels}}' |
            python3 -c 'import json, sys; print(json.load(sys.stdin)["org.opencontainers.image." + sys.argv[1]])' "$label") ||
            fail "$image: label $label is missing"
        [[ -n $value || $label == base.digest ]] || fail "$image: label $label is empty"
    done
    pass "$image: user 10001:10001, entrypoint, health check, labels"
}

inspect_cpu() {
    check_image portamoe-cpu
    local labels
    labels=$(inspected portamoe-cpu '{{json .Labels}}')
    grep -q "\"org.opencontainers.image.revision\":\"$REVISION\"" <<<"$labels" || fail "revision label: $labels"
    grep -q '"org.opencontainers.image.base.name":"localhost/base"' <<<"$labels" || fail "base label: $labels"
    # The allow-list of .dockerignore: what is not copied never entered the context.
    contained localhost/portamoe-cpu sh -c '! ls -d /src /wheels /opt/build 2>/dev/null' || fail "build files are in the image"
    pass "portamoe-cpu: built from $REVISION, build stages left nothing behind"
}

# probe_image IMAGE: no arguments show the probe; --json is one object.
probe_image() {
    FLAGS=(--tmpfs /tmp)
    local output
    output=$(run_image "$1") || fail "$1: the probe failed"
    [[ $output == *torch* ]] || fail "$1: no arguments did not show the probe: $output"
    run_image "$1" probe capabilities --json | python3 -m json.tool >/dev/null || fail "$1: probe --json is not JSON"
    pass "$1: probe without arguments and as JSON"
}

run_cpu() {
    say "running the CPU image"
    probe_image portamoe-cpu
    local data=tests/data/kimi-k3-tiny uid output
    local arguments=(run --checkpoint /data --layer 1 --input /data/expected/layer_1.safetensors
        --expected /data/expected/layer_1.safetensors --backend torch)
    for uid in 10001:10001 54321:0 1000650000:1000650000; do
        FLAGS=(--tmpfs /tmp --user "$uid" --volume "$ROOT/$data:/data:ro")
        output=$(run_image portamoe-cpu "${arguments[@]}" 2>"$WORK/stderr") || {
            cat "$WORK/stderr" >&2
            fail "run as $uid"
        }
        [[ $output == *passed* ]] || fail "run as $uid did not compare its result: $output"
        pass "run on $data as $uid: read-only, no network, no capabilities"
    done
    # The environment in which it ran is what was asked for.
    FLAGS=(--tmpfs /tmp --user 54321:0)
    output=$(run_image portamoe-cpu python -c '
import getpass, os, pathlib, socket
status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
assert os.getuid() == 54321 and getpass.getuser()
assert int(status["CapEff"], 16) == 0 and int(status["NoNewPrivs"]) == 1
assert [name for _, name in socket.if_nameindex()] == ["lo"]
assert os.statvfs("/").f_flag & os.ST_RDONLY
assert os.environ["HOME"].startswith("/tmp/portamoe-54321/") and os.access(os.environ["HOME"], os.W_OK)
assert os.access(os.environ["TRITON_CACHE_DIR"], os.W_OK)
print("checked")') || fail "the container is not as strict as asked for"
    equals "inside" "$output" checked
    pass "UID 54321, no capabilities, lo only, read-only root, HOME and caches in /tmp"

    # Nothing writable at all: podman gives a read-only container tmpfs on /tmp unless told otherwise.
    FLAGS=(--read-only-tmpfs=false --user 54321:0 --volume "$WORK/empty:/dev/shm:ro")
    mkdir -p "$WORK/empty"
    output=$(run_image portamoe-cpu probe capabilities --json 2>"$WORK/stderr") || fail "probe without a writable folder"
    python3 -m json.tool <<<"$output" >/dev/null || fail "stdout holds more than JSON: $output"
    grep -q 'no writable folder' "$WORK/stderr" || fail "nothing said that no folder is writable: $(cat "$WORK/stderr")"
    pass "probe works, and says so, where no folder is writable"

    # A device node's stand-in that only root can open.
    install -m 0600 /dev/null "$WORK/kfd"
    FLAGS=(--tmpfs /tmp --user 54321:0 --volume "$WORK/kfd:/dev/kfd:ro")
    run_image portamoe-cpu probe >/dev/null 2>"$WORK/stderr" || fail "probe with an inaccessible /dev/kfd"
    grep -q 'cannot open it.*group-add' "$WORK/stderr" || fail "no message about /dev/kfd: $(cat "$WORK/stderr")"
    pass "a /dev/kfd that cannot be opened is explained"
}
