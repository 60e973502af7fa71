// Builds into the package, or into the directory after `--outDir`.
import { resolve } from "node:path";
import { build } from "vite";
import { stamp } from "./stamp.mjs";

const at = process.argv.indexOf("--outDir");
const outDir = at > 0 ? process.argv[at + 1] : resolve("../holdfast/supervisor/dashboard");
await build({ build: { outDir, emptyOutDir: true } });
stamp(outDir);
