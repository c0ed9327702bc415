#!/usr/bin/env bash
# Runs the tests of the codecs' kernels as an ARM processor would, by qemu; takes ten minutes.
#
#   bash tests/kernels_on_arm.sh [FOLDER]     FOLDER keeps what was fetched (default: a temporary one)
#
# On Debian, once: dpkg --add-architecture arm64, apt-get update, apt-get install qemu-user-static.
# Python and its libraries are Debian's, the other packages PyPI's.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
folder=${1:-$(mktemp -d)}
uv=$(command -v uv || echo "$HOME/.cache/thermocline/uv/bin/uv")
libraries='libc6 libgcc-s1 libstdc++6 libgomp1 libexpat1 zlib1g libssl3 libffi8 libbz2-1.0 liblzma5
    libsqlite3-0 libuuid1 libcrypt1'
python='python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib'

if [ ! -e "$folder/ready" ]; then
    mkdir -p "$folder/packages" "$folder/system/proc"
    # shellcheck disable=SC2086  # words
    (cd "$folder/packages" && apt-get download -q $(printf '%s:arm64 ' $python $libraries))
    for package in "$folder"/packages/*.deb; do dpkg-deb -x "$package" "$folder/system"; done
    "$uv" pip install --quiet --python-platform aarch64-manylinux_2_28 --python-version 3.11 \
        --only-binary :all: --target "$folder/site" --requirement "$root/pyproject.toml" \
        --extra fast --extra redis hypothesis pytest pytest-asyncio pytest-timeout
    # qemu shows this machine's processor otherwise. LLVM knows the part by its number.
    printf '%s\n' 'processor : 0' 'CPU implementer : 0x41' 'CPU part : 0xd4f' \
        'Features : fp asimd aes sha1 sha2 crc32 atomics asimdrdm asimddp' >"$folder/system/proc/cpuinfo"
    touch "$folder/ready"
fi

cd "$root"
mapfile -t suites < <("$root/.venv/bin/python" -c '
from tests.unit.kvstore.codecs.kernels.test_lesser_hosts import CHOSEN, CODECS, SUITES
print(CHOSEN, *(CODECS / x for x in SUITES), sep="\n")')
exec qemu-aarch64-static -cpu max -L "$folder/system" \
    -E PYTHONPATH="$folder/site" -E NUMBA_CACHE_DIR="$folder/compiled" -E OPENBLAS_NUM_THREADS=1 \
    "$folder/system/usr/bin/python3.11" -m pytest -q -p no:cacheprovider --timeout 3600 \
    -k "${suites[0]}" "${suites[@]:1}"
