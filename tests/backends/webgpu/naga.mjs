// The WGSL on standard input in another language, metal or spirv (in base64), by the naga in the folder that is named.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const folder = pathToFileURL(`${process.argv[2]}/`);
const glue = await import(new URL("wgsl_wasm_transpiler_bg.js", folder));
const bytes = readFileSync(new URL("wgsl_wasm_transpiler_bg.wasm", folder));
const { instance } = await WebAssembly.instantiate(bytes, { "./wgsl_wasm_transpiler_bg.js": glue });
glue.__wbg_set_wasm(instance.exports);
instance.exports.__wbindgen_start();
process.stdout.write(glue.compileShader(readFileSync(0, "utf8"), process.argv[3]));
