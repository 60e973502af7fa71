// The ranks of a job on one canvas, along any two axes of its mesh, coloured by state, step time, temperature and more.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { path, type RankColumns, type RankMeasurements, useLook } from "./api";
import { color, useScheme, useWidth } from "./chart";
import { count, duration } from "./format";
import { BY, type By, in_words, is_measured, largest, numbers, scale_of, shares, shows_largest } from "./mesh_colors";
import { first_axes, type Layout, layout, type Mesh, position } from "./mesh_layout";
import { Loading, Problem } from "./parts";

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
const MEASURED_EVERY_MS = 5_000;
const LARGEST = 5; // ranks that are named

export function MeshMap({ value }: { value: RankColumns }) {
  const mesh = useMemo<Mesh>(() => Object.entries(value.mesh), [JSON.stringify(value.mesh)]);
  const [axes, setAxes] = useState(() => first_axes(mesh));
  const [by, setBy] = useState<By>("state");
  const [rank, setRank] = useState<number | null>(null);
  const { ref, width } = useWidth();
  const look = useLook<RankMeasurements>(
    is_measured(by) ? path("jobs", value.job, "ranks", "measurements") : null, // agents are asked only while this is shown
    MEASURED_EVERY_MS,
    false,
  );
  const measured = look.value;
  const given = useMemo(() => (by === "state" ? null : numbers(value, measured, by)), [value, measured, by]);
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
      <Problem text={look.problem} />
      {shape && <Canvas {...{ value, shape, by, given, rank, setRank }} />}
      <p class="quiet" role="status">
        {rank !== null && rank in value.state ? (
          <Described value={value} measured={measured} rank={rank} mesh={mesh} />
        ) : (
          "Point at a rank, or enter its number."
        )}
      </p>
      <Key
        {...{ value, measured, by, given }}
        asking={is_measured(by) && !measured && !look.problem}
        shared={shape?.shared ?? false}
        blocks={shape?.blocks ?? 1}
      />
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

function Described({
  value,
  measured,
  rank,
  mesh,
}: {
  value: RankColumns;
  measured: RankMeasurements | null;
  rank: number;
  mesh: Mesh;
}) {
  const at = Object.entries(position(mesh, rank))
    .map(([name, index]) => `${name} ${index}`)
    .join(", ");
  const state = value.states[value.state[rank]!]!;
  const age_s = value.age_s[rank]!;
  return (
    <>
      Rank {rank} ({at}) on {value.nodes[value.node[rank]!]}: {state}
      {age_s >= 0 ? `, process started ${duration(age_s)} ago` : ""}
      {measured?.generation === value.generation ? `, ${measured_in_words(measured, rank)}` : ""}
    </>
  );
}

function measured_in_words(measured: RankMeasurements, rank: number): string {
  const [step_s, wait_s, temperature] = [measured.step_s[rank], measured.wait_s[rank], measured.temperature_c[rank]];
  const waits = wait_s == null ? "" : ` of which it waits ${duration(wait_s)} for others`;
  const steps = step_s == null ? "step time not known" : `step time ${duration(step_s)}${waits}`;
  return `${steps}, ${temperature == null ? "temperature not known" : in_words("temperature", temperature)}`;
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
  given,
  rank,
  setRank,
}: {
  value: RankColumns;
  shape: Layout;
  by: By;
  given: Float64Array | null;
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
    draw(context, shape, given ? by_number(given, shape, by) : by_state(value, shape));
    if (rank !== null && rank in value.state) mark(context, shape, rank);
  }, [value, shape, by, given, rank, scheme]);
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

function draw(context: CanvasRenderingContext2D, shape: Layout, cells: Painter) {
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

/** Pale for the least number and full for the largest. */
function by_number(given: Float64Array, shape: Layout, by: By): Painter {
  const cells = shares(given, shape, scale_of(given, by), shows_largest(by));
  const [known, unknown] = [color("accent"), color("off")];
  return (cell) => {
    const share = cells[cell]!;
    if (share === -2) return null;
    return share < 0 ? { color: unknown, alpha: 0.5 } : { color: known, alpha: 0.2 + 0.8 * share };
  };
}

/** The numbers behind the colours: their ends, and which ranks have the largest. */
function Numbers({ value, given, by }: { value: RankColumns; given: Float64Array; by: By }) {
  const scale = useMemo(() => scale_of(given, by), [given, by]);
  const most = useMemo(() => largest(given, LARGEST), [given]);
  if (!scale.known) return <p class="quiet">Grey: not known, of any rank.</p>;
  const full =
    scale.top > scale.most
      ? `The largest, ${in_words(by, scale.most)}, differs so little that it is drawn pale as well`
      : `Full colour: the largest, ${in_words(by, scale.most)}`;
  return (
    <>
      <p class="quiet">
        Pale: the least, {in_words(by, scale.least)}. {full}. Grey: not known
        {scale.known < given.length ? `, of ${count(given.length - scale.known, "rank")}` : ""}.
      </p>
      {is_measured(by) && (
        <p>
          {by === "temperature" ? "Hottest" : "Slowest"}:{" "}
          {most
            .map((rank) => `rank ${rank} on ${value.nodes[value.node[rank]!]} (${in_words(by, given[rank]!)})`)
            .join(", ")}
          .
        </p>
      )}
    </>
  );
}

function Key({
  value,
  measured,
  by,
  given,
  asking,
  shared,
  blocks,
}: {
  value: RankColumns;
  measured: RankMeasurements | null;
  by: By;
  given: Float64Array | null;
  asking: boolean;
  shared: boolean;
  blocks: number;
}) {
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
      {asking ? <Loading what="the agents' measurements" /> : given && <Numbers value={value} given={given} by={by} />}
      {is_measured(by) && measured && measured.answered < measured.nodes && (
        <p class="quiet">
          {measured.answered.toLocaleString("en")} of {count(measured.nodes, "node")} have answered within the last two
          minutes.
        </p>
      )}
      {blocks > 1 && <p class="quiet">{`In ${blocks} blocks: the rows of each go on in the next one to the right.`}</p>}
      {shared && (
        <p class="quiet">
          Each cell stands for several ranks and shows{" "}
          {by === "state"
            ? "the worst state among them, the paler, the fewer are in it"
            : shows_largest(by)
              ? "the largest number among them"
              : "their mean"}
          .
        </p>
      )}
    </>
  );
}
