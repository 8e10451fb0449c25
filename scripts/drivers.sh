#!/bin/sh
# Makes sure that a Vulkan driver is here that executes shaders on the CPU: Mesa's lavapipe. Tests of the WebGPU
# engine run on it. Prints the file that VK_ICD_FILENAMES is to name; says in one line what is missing if it cannot.
set -eu

found() {
    for folder in /usr/share/vulkan/icd.d /usr/local/share/vulkan/icd.d; do
        for file in "$folder"/lvp_icd*.json; do
            if [ -e "$file" ]; then
                echo "$file"
                return 0
            fi
        done
    done
    return 1
}

found && exit 0
if [ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    {
        apt-get install -y --no-install-recommends mesa-vulkan-drivers libvulkan1 ||
            { apt-get update && apt-get install -y --no-install-recommends mesa-vulkan-drivers libvulkan1; }
    } >/dev/null 2>&1 || true
    found && exit 0
fi
echo "no lavapipe here (as root on Debian or Ubuntu: apt install mesa-vulkan-drivers libvulkan1)" >&2
exit 1
