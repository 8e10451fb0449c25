#!/bin/sh
# Makes sure that naga is here as a WebAssembly module, which translates WGSL into Metal's language: tests run what
# wgpu would give a Mac. Prints its folder; says in one line what is missing if it cannot.
set -eu

room=$(dirname "$0")/../build/naga
package=$room/node_modules/wgsl-wasm-transpiler-bundler
if command -v node >/dev/null 2>&1; then
    [ -e "$package/package.json" ] || npm install --silent --no-save --prefix "$room" \
        wgsl-wasm-transpiler-bundler@0.0.1 >/dev/null 2>&1 || true
    if [ -e "$package/package.json" ]; then
        cd "$package" && pwd
        exit 0
    fi
    echo "no naga here: npm could not install wgsl-wasm-transpiler-bundler" >&2
    exit 1
fi
echo "no node here, which runs naga" >&2
exit 1
