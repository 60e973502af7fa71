// The ranks of a job on one canvas, along any two axes of its mesh, coloured by state, age of the process or faults of the node.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import type { RankColumns } from "./api";
import { color, useScheme, useWidth } from "./chart";
import { count, duration } from "./format";
import { first_axes, type Layout, layout, type Mesh, position } from "./mesh_layout";

const HEIGHT_MAX_PX = 420;
// Worst last: a cell of several ranks shows the worst of them.
const ORDER = ["alive", "starting", "unreported", "suspect", "absent", "lost"];
export const RANK_TONES: Record<string, string> = {
  alive: "ok",
  starting: "info",
  unreported: "off",
  suspect: "busy",
  absent: "bad",
  lost: "bad-strong",
};
export const RANK_MEANING: Record<string, string> = {
  alive: "its agent reports its process",
  starting: "the generation is being prepared or started",
  unreported: "its agent does not report processes",
  suspect: "an open incident names it or its node",
  absent: "its agent reports no process for it",
  lost: "its node is lost or unknown",
};
const BY = ["state", "age of the process", "faults a day of the node"] as const;
type By = (typeof BY)[number];

export function MeshMap({ value }: { value: RankColumns }) {
  const mesh = useMemo<Mesh>(() => Object.entries(value.mesh), [JSON.stringify(value.mesh)]);
  const [axes, setAxes] = useState(() => first_axes(mesh));
  const [by, setBy] = useState<By>("state");
  const [rank, setRank] = useState<number | null>(null);
  const { ref, width } = useWidth();
  const known = mesh.some(([name]) => name === axes.down) ? axes : first_axes(mesh);
  const shape = useMemo(
    () => (width ? layout(mesh, known.down, known.across, width, HEIGHT_MAX_PX) : null),
    [mesh, known.down, known.across, width],
  );
  const names = mesh.map(([name]) => name);
  return (
    <div class="mesh" ref={ref}>
      <form class="filters" onSubmit={(event) => event.preventDefault()}>
        <Choice
          label="Down"
          value={known.down}
          options={names.filter((name) => name !== known.across)}
          choose={(down) => setAxes({ ...known, down })}
        />
        <Choice
          label="Across"
          value={known.across}
          options={["", ...names.filter((name) => name !== known.down)]}
          choose={(across) => setAxes({ ...known, across })}
        />
        <Choice label="Colour" value={by} options={[...BY]} choose={(each) => setBy(each as By)} />
        <label>
          Rank{" "}
          <input
            type="number"
            min={0}
            max={value.state.length - 1}
            value={rank ?? ""}
            onInput={(event) => setRank(event.currentTarget.value === "" ? null : event.currentTarget.valueAsNumber)}
          />
        </label>
      </form>
      {shape && <Canvas {...{ value, shape, by, rank, setRank }} />}
      <p class="quiet" role="status">
        {rank !== null && rank in value.state ? (
          <Described value={value} rank={rank} mesh={mesh} />
        ) : (
          "Point at a rank, or enter its number."
        )}
      </p>
      <Key value={value} by={by} shared={shape?.shared ?? false} blocks={shape?.blocks ?? 1} />
    </div>
  );
}

function Choice({
  label,
  value,
  options,
  choose,
}: {
  label: string;
  value: string;
  options: string[];
  choose: (value: string) => void;
}) {
  return (
    <label>
      {label}{" "}
      <select value={value} onChange={(event) => choose(event.currentTarget.value)}>
        {options.map((each) => (
          <option key={each} value={each}>
            {each || "nothing"}
          </option>
        ))}
      </select>
    </label>
  );
}

function Described({ value, rank, mesh }: { value: RankColumns; rank: number; mesh: Mesh }) {
  const at = Object.entries(position(mesh, rank))
    .map(([name, index]) => `${name} ${index}`)
    .join(", ");
  const state = value.states[value.state[rank]!]!;
  const age_s = value.age_s[rank]!;
  return (
    <>
      Rank {rank} ({at}) on {value.nodes[value.node[rank]!]}: {state}
      {age_s >= 0 ? `, process started ${duration(age_s)} ago` : ""}
    </>
  );
}

/** Number of ranks by state, in words. */
export function states_in_words(value: RankColumns): string {
  const counts = value.states.map(
    (state, n) => [state, value.state.reduce((sum, each) => sum + Number(each === n), 0)] as const,
  );
  return counts
    .filter(([, number]) => number)
    .map(([state, number]) => `${number.toLocaleString("en")} ${state}`)
    .join(", ");
}

function Canvas({
  value,
  shape,
  by,
  rank,
  setRank,
}: {
  value: RankColumns;
  shape: Layout;
  by: By;
  rank: number | null;
  setRank: (rank: number | null) => void;
}) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const scheme = useScheme();
  const first_of = useMemo(() => {
    const found = new Int32Array(shape.columns * shape.rows).fill(-1);
    for (let each = shape.cell_of.length - 1; each >= 0; each--) found[shape.cell_of[each]!] = each;
    return found;
  }, [shape]);
  const [width, height] = [shape.columns * shape.cell_px[0], shape.rows * shape.cell_px[1]];
  useEffect(() => {
    const context = canvas.current!.getContext("2d")!;
    const ratio = devicePixelRatio;
    canvas.current!.width = Math.round(width * ratio);
    canvas.current!.height = Math.round(height * ratio);
    context.scale(ratio, ratio);
    draw(context, value, shape, by);
    if (rank !== null && rank in value.state) mark(context, shape, rank);
  }, [value, shape, by, rank, scheme]);
  const point = (event: PointerEvent) => {
    const [x, y] = [Math.floor(event.offsetX / shape.cell_px[0]), Math.floor(event.offsetY / shape.cell_px[1])];
    const found = x < shape.columns && y < shape.rows ? first_of[y * shape.columns + x]! : -1;
    if (found >= 0) setRank(found);
  };
  return (
    <canvas
      ref={canvas}
      role="img"
      aria-label={`${count(value.state.length, "rank")}: ${states_in_words(value)}`}
      style={{ width: `${width}px`, height: `${height}px` }}
      onPointerMove={point}
      onPointerDown={point}
    />
  );
}

function draw(context: CanvasRenderingContext2D, value: RankColumns, shape: Layout, by: By) {
  const cells = by === "state" ? by_state(value, shape) : by_number(numbers(value, by), shape);
  const gap = Math.min(...shape.cell_px) >= 6 ? 1 : 0;
  const [cell_width, cell_height] = shape.cell_px;
  for (let cell = 0; cell < shape.columns * shape.rows; cell++) {
    const paint = cells(cell);
    if (!paint) continue;
    context.fillStyle = paint.color;
    context.globalAlpha = paint.alpha;
    context.fillRect(
      (cell % shape.columns) * cell_width,
      Math.floor(cell / shape.columns) * cell_height,
      cell_width - gap,
      cell_height - gap,
    );
  }
  context.globalAlpha = 1;
}

function mark(context: CanvasRenderingContext2D, shape: Layout, rank: number) {
  const cell = shape.cell_of[rank]!;
  const [width, height] = shape.cell_px;
  context.strokeStyle = color("text");
  context.lineWidth = 2;
  context.strokeRect((cell % shape.columns) * width, Math.floor(cell / shape.columns) * height, width - 1, height - 1);
}

type Painter = (cell: number) => { color: string; alpha: number } | null;

/** The worst state of a cell's ranks; the paler, the fewer of them are in it. */
function by_state(value: RankColumns, shape: Layout): Painter {
  const badness = value.states.map((state) => ORDER.indexOf(state));
  const worst = new Int8Array(shape.columns * shape.rows).fill(-1);
  const [total, same] = [new Int32Array(worst.length), new Int32Array(worst.length)];
  shape.cell_of.forEach((cell, rank) => {
    const bad = badness[value.state[rank]!]!;
    total[cell]! += 1;
    if (bad > worst[cell]!) {
      worst[cell] = bad;
      same[cell] = 0;
    }
    if (bad === worst[cell]) same[cell]! += 1;
  });
  const colors = ORDER.map((state) => color(RANK_TONES[state]!));
  return (cell) =>
    worst[cell]! < 0 ? null : { color: colors[worst[cell]!]!, alpha: 0.55 + (0.45 * same[cell]!) / total[cell]! };
}

/** A number of each rank; NaN = not known. */
function numbers(value: RankColumns, by: By): Float64Array {
  return Float64Array.from(value.state, (_, rank) => {
    if (by === "faults a day of the node") return value.faults_per_day[value.node[rank]!]!;
    const age_s = value.age_s[rank]!;
    return age_s < 0 ? Number.NaN : age_s;
  });
}

/** The mean of a cell's known numbers, pale for the least and full for the largest. */
function by_number(given: Float64Array, shape: Layout): Painter {
  const [sums, counts] = [new Float64Array(shape.columns * shape.rows), new Int32Array(shape.columns * shape.rows)];
  const drawn = new Uint8Array(sums.length);
  let [least, most] = [Number.POSITIVE_INFINITY, Number.NEGATIVE_INFINITY];
  shape.cell_of.forEach((cell, rank) => {
    const number = given[rank]!;
    drawn[cell] = 1;
    if (Number.isNaN(number)) return;
    sums[cell]! += number;
    counts[cell]! += 1;
    least = Math.min(least, number);
    most = Math.max(most, number);
  });
  const [known, unknown] = [color("accent"), color("off")];
  return (cell) => {
    if (!drawn[cell]) return null;
    if (!counts[cell]) return { color: unknown, alpha: 0.5 };
    const share = most > least ? (sums[cell]! / counts[cell]! - least) / (most - least) : 0;
    return { color: known, alpha: 0.2 + 0.8 * share };
  };
}

function Key({ value, by, shared, blocks }: { value: RankColumns; by: By; shared: boolean; blocks: number }) {
  const present = ORDER.filter((state) => value.state.includes(value.states.indexOf(state)));
  return (
    <>
      {by === "state" && (
        <ul class="legend" aria-label="States of ranks">
          {present.map((state) => (
            <li key={state}>
              <i class={`tone-${RANK_TONES[state]}`} />
              {state}: {RANK_MEANING[state]}
            </li>
          ))}
        </ul>
      )}
      {by !== "state" && <p class="quiet">Pale: the least. Full colour: the largest. Grey: not known.</p>}
      {blocks > 1 && <p class="quiet">{`In ${blocks} blocks: the rows of each go on in the next one to the right.`}</p>}
      {shared && (
        <p class="quiet">
          Each cell stands for several ranks and shows{" "}
          {by === "state" ? "the worst state among them, the paler, the fewer are in it" : "their mean"}.
        </p>
      )}
    </>
  );
}
