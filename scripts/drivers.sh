#!/bin/sh
# Makes sure that a Vulkan driver is here that executes shaders on the CPU; tests of the WebGPU engine run on two.
#
#   drivers.sh lavapipe      Mesa's
#   drivers.sh swiftshader   Google's, a part of Chromium and Chrome
#   drivers.sh spirv-cross   no driver, but what translates SPIR-V into Metal's language
#
# Prints the file that VK_ICD_FILENAMES is to name, or the program; says in one line what is missing if it cannot.
set -eu

case ${1:-lavapipe} in
lavapipe)
    files='/usr/share/vulkan/icd.d/lvp_icd*.json /usr/local/share/vulkan/icd.d/lvp_icd*.json'
    packages='mesa-vulkan-drivers libvulkan1' ;;
swiftshader)
    files='/usr/lib/chromium*/vk_swiftshader_icd.json /usr/lib64/chromium*/vk_swiftshader_icd.json
        /opt/google/chrome*/vk_swiftshader_icd.json'
    packages='chromium libvulkan1' ;;
spirv-cross)
    files=$(command -v spirv-cross || echo /usr/bin/spirv-cross)
    packages=spirv-cross ;;
*)
    echo "nothing is called $1 here: lavapipe, swiftshader or spirv-cross" >&2
    exit 1 ;;
esac

found() {
    for file in $files; do
        if [ -e "$file" ]; then
            echo "$file"
            return 0
        fi
    done
    return 1
}

found && exit 0
if [ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    {
        # shellcheck disable=SC2086
        timeout 180 apt-get install -y --no-install-recommends $packages ||
            { timeout 60 apt-get update && timeout 180 apt-get install -y --no-install-recommends $packages; }
    } >/dev/null 2>&1 || true
    found && exit 0
fi
echo "no ${1:-lavapipe} here (as root on Debian: apt install $packages)" >&2
exit 1
