import { defineConfig } from "vite";

// Names without hashes: the files are committed, and the server answers with ETags.
export default defineConfig({
  base: "./",
  build: {
    sourcemap: false,
    modulePreload: false,
    target: "es2022",
    rollupOptions: {
      output: {
        entryFileNames: "app.js",
        chunkFileNames: "[name].js",
        assetFileNames: "[name][extname]",
      },
    },
  },
});
