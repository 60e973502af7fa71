// Writes beside the built files what they were built from, and the licences of the libraries in them.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const INPUTS = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"];
const BUNDLED = ["preact", "uplot"];

/** Write `build.json` and `LICENSES.txt` into a directory of built files. */
export function stamp(outDir) {
  // As check.py computes it: of each file in order of its path: path, NUL, length, NUL, bytes.
  const sources = readdirSync("src", { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => join(entry.parentPath, entry.name));
  const hash = createHash("sha256");
  for (const path of [...INPUTS, ...sources].sort()) {
    const bytes = readFileSync(path);
    hash.update(`${path}\0${bytes.length}\0`);
    hash.update(bytes);
  }
  writeFileSync(join(outDir, "build.json"), `${JSON.stringify({ sources_sha256: hash.digest("hex") })}\n`);

  const licences = BUNDLED.map((name) => {
    const directory = join("node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(directory, "package.json"), "utf8"));
    const file = readdirSync(directory).find((each) => /^licen[cs]e/i.test(each));
    return `${name} ${version} (${license})\n\n${readFileSync(join(directory, file), "utf8").trim()}\n`;
  });
  writeFileSync(join(outDir, "LICENSES.txt"), licences.join(`\n${"-".repeat(80)}\n\n`));
}
