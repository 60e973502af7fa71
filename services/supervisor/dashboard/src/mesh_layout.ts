// Where each rank of a mesh is drawn. Pure.
//
// Theory. Two axes of the mesh become the rows and the columns of a grid; the axes that are left make a small grid inside each of its
// cells. With one axis (`across` = "") its positions fill lines of the width that there is. When a cell would be smaller than
// `CELL_MIN_PX`, the rows are cut into blocks side by side, as many as the width has room for. If that is not enough, neighbours share
// a cell: then the picture is a density map, and says for each cell which share is in which state.

export const CELL_MIN_PX = 3;
const GAP_COLUMNS = 1; // between two blocks

export interface Layout {
  columns: number; // cells that are drawn
  rows: number;
  cell_px: [number, number];
  shared: boolean; // a cell stands for several ranks
  blocks: number; // side by side: the rows of one go on in the next
  cell_of: Int32Array; // by rank: row × columns + column
}

export type Mesh = [name: string, size: number][]; // outermost dimension first: the last one changes fastest with the rank

/** Position of a rank along each axis. */
export function position(mesh: Mesh, rank: number): Record<string, number> {
  const found: [string, number][] = [];
  let rest = rank;
  for (const [name, size] of [...mesh].reverse()) {
    found.unshift([name, rest % size]);
    rest = Math.floor(rest / size);
  }
  return Object.fromEntries(found);
}

/** The axes to begin with: the outermost one down, and the next larger than 1 across. */
export function first_axes(mesh: Mesh): { down: string; across: string } {
  const long = mesh.filter(([, size]) => size > 1);
  return { down: long[0]?.[0] ?? mesh[0]?.[0] ?? "", across: long[1]?.[0] ?? "" };
}

export function layout(mesh: Mesh, down: string, across: string, width_px: number, height_max_px: number): Layout {
  const size_of = (name: string) => mesh.find(([each]) => each === name)?.[1] ?? 1;
  const ranks = mesh.reduce((product, [, size]) => product * size, 1);
  const inner = ranks / size_of(down) / size_of(across);
  const wrapped = across === "" ? Math.min(size_of(down), wrap(size_of(down), inner, width_px, height_max_px)) : 0;
  const outer_columns = wrapped || size_of(across);
  const outer_rows = wrapped ? Math.ceil(size_of(down) / wrapped) : size_of(down);
  const inner_columns = inner_width(inner, width_px / outer_columns / (height_max_px / outer_rows));
  const inner_rows = Math.ceil(inner / inner_columns);
  const block = { columns: outer_columns * inner_columns, rows: outer_rows * inner_rows };
  const blocks = blocks_of(block, width_px, height_max_px);
  const all = {
    columns: blocks * (block.columns + GAP_COLUMNS) - GAP_COLUMNS,
    rows: Math.ceil(outer_rows / blocks) * inner_rows,
  };
  const columns = Math.min(all.columns, Math.floor(width_px / CELL_MIN_PX));
  const rows = Math.min(all.rows, Math.floor(height_max_px / CELL_MIN_PX));
  const cell_of = new Int32Array(ranks);
  const strides = strides_of(mesh);
  for (let rank = 0; rank < ranks; rank++) {
    let [y, x, within] = [0, 0, 0];
    for (const { name, size, stride } of strides) {
      const at = Math.floor(rank / stride) % size;
      if (name === down) y = at;
      else if (name === across) x = at;
      else within = within * size + at;
    }
    if (wrapped) [y, x] = [Math.floor(y / wrapped), y % wrapped];
    const down_rows = all.rows / inner_rows; // of one block
    const left = Math.floor(y / down_rows) * (block.columns + GAP_COLUMNS);
    const column = left + x * inner_columns + (within % inner_columns);
    const row = (y % down_rows) * inner_rows + Math.floor(within / inner_columns);
    cell_of[rank] = Math.floor((row * rows) / all.rows) * columns + Math.floor((column * columns) / all.columns);
  }
  const square_px = Math.floor(Math.min(width_px / columns, height_max_px / rows, 28));
  const cell_px: [number, number] = [Math.floor(Math.min(width_px / columns, Math.max(square_px, 56))), square_px];
  return { columns, rows, cell_px, shared: columns < all.columns || rows < all.rows, blocks, cell_of };
}

/** How many blocks fit side by side, and are needed. */
function blocks_of(block: { columns: number; rows: number }, width_px: number, height_px: number): number {
  const needed = Math.ceil((block.rows * CELL_MIN_PX) / height_px);
  const fit = Math.floor(width_px / CELL_MIN_PX / (block.columns + GAP_COLUMNS));
  return Math.max(1, Math.min(needed, fit));
}

function strides_of(mesh: Mesh) {
  let stride = 1;
  const found = [];
  for (const [name, size] of [...mesh].reverse()) {
    found.unshift({ name, size, stride });
    stride *= size;
  }
  return found;
}

function wrap(size: number, inner: number, width_px: number, height_px: number): number {
  return Math.max(1, Math.ceil(Math.sqrt((size * inner * width_px) / height_px) / inner));
}

/** Columns of the small grid inside a cell of this aspect (width ÷ height). */
function inner_width(inner: number, aspect: number): number {
  return Math.min(inner, Math.max(1, Math.round(Math.sqrt(inner * aspect))));
}
