// One time axis: loss, tokens per second and ranks above each other, the classes of goodput below, incidents on all of them.
import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import type { Timeline } from "./api";
import { CLASSES, MEANING } from "./classes";
import { absolute, duration, short } from "./format";
import { Legend, link } from "./parts";

const LEFT_PX = 64;
const RIGHT_PX = 24; // half of the last time
// At least a second, because labels have no fractions.
const TICKS_S = [
  ...[1, 2, 5, 10, 15, 30],
  ...[1, 2, 5, 10, 15, 30].map((minutes) => minutes * 60),
  ...[1, 2, 3, 4, 6, 8, 12, 24, 48, 72, 168, 336, 672, 2016, 8064].map((hours) => hours * 3600),
];
const TOP_PX = 8;

export const color = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Changes when the browser's colour scheme does: what is drawn on a canvas is drawn again. */
export function useScheme(): string {
  const query = matchMedia("(prefers-color-scheme: dark)");
  const [dark, setDark] = useState(query.matches);
  useEffect(() => {
    const changed = () => setDark(query.matches);
    query.addEventListener("change", changed);
    return () => query.removeEventListener("change", changed);
  }, []);
  return dark ? "dark" : "light";
}

/** Width of an element in CSS pixels, as it changes. */
export function useWidth() {
  const ref = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.floor(entry!.contentRect.width)));
    observer.observe(ref.current!);
    return () => observer.disconnect();
  }, []);
  return { ref, width };
}

export function TimelineChart({ value }: { value: Timeline }) {
  const { ref, width } = useWidth();
  const scheme = useScheme();
  const hasLoss = value.loss.some((each) => each !== null);
  const gaps = withGaps(value);
  const sizes = steps(value);
  return (
    <div ref={ref} class="timeline">
      {width > 0 && (
        <>
          {hasLoss ? (
            <Plot
              key={`loss ${scheme}`}
              title="loss"
              at={gaps.at}
              values={gaps.loss}
              stroke="accent"
              {...{ width, value }}
            />
          ) : (
            <p class="quiet">Loss: the script reports none.</p>
          )}
          <Plot
            key={`rate ${scheme}`}
            title="tokens/s"
            at={gaps.at}
            values={gaps.rate}
            stroke="ok"
            zero
            {...{ width, value }}
          />
          <Plot
            key={`ranks ${scheme}`}
            title="ranks"
            at={sizes.at}
            values={sizes.ranks}
            stroke="info"
            zero
            stepped
            axis
            {...{ width, value }}
          />
          <ClassStrip value={value} width={width} />
        </>
      )}
      <Legend names={CLASSES.filter((name) => value.spans.kind.includes(name))} />
      <IncidentList value={value} />
    </div>
  );
}

type Values = (number | null)[];

/** A null where two buckets are not neighbours: a line over a pause would be a lie. */
function withGaps(value: Timeline): { at: number[]; loss: Values; rate: Values } {
  const made: { at: number[]; loss: Values; rate: Values } = { at: [], loss: [], rate: [] };
  value.at.forEach((at, n) => {
    const before = value.at[n - 1];
    if (before !== undefined && at - before > 2.5 * value.bucket_s) {
      made.at.push((at + before) / 2);
      made.loss.push(null);
      made.rate.push(0);
    }
    made.at.push(at);
    made.loss.push(value.loss[n] ?? null);
    made.rate.push(value.tokens_per_s[n]!);
  });
  return made;
}

function steps(value: Timeline): { at: number[]; ranks: Values } {
  const at = value.world_sizes.map((each) => (each as [number, number])[0]);
  const ranks: Values = value.world_sizes.map((each) => (each as [number, number])[1]);
  if (at.length) {
    at.push(value.until);
    ranks.push(ranks.at(-1)!);
  }
  return { at, ranks };
}

interface PlotProps {
  title: string;
  at: number[];
  values: Values;
  stroke: string;
  width: number;
  value: Timeline;
  zero?: boolean; // the axis begins at 0
  stepped?: boolean;
  axis?: boolean; // with the times below
}

function Plot({ title, at, values, stroke, width, value, zero, stepped, axis }: PlotProps) {
  const place = useRef<HTMLDivElement>(null);
  const marks = useRef(value);
  marks.current = value;
  const plot = useRef<uPlot | null>(null);
  useEffect(() => {
    const text = color("quiet");
    const lines = { stroke: color("line"), width: 1 };
    const paths = stepped ? uPlot.paths.stepped!({ align: 1 }) : uPlot.paths.linear!();
    const made = new uPlot(
      {
        width,
        height: axis ? 116 : 96,
        padding: [TOP_PX, RIGHT_PX, axis ? 0 : 4, 0],
        legend: { show: false },
        cursor: { sync: { key: "time" }, drag: { x: false, y: false }, points: { size: 5 } },
        scales: {
          x: { time: true, range: () => [marks.current.since, Math.max(marks.current.until, marks.current.since + 1)] },
          y: zero ? { range: (_plot, _min, max) => [0, max > 0 ? max * 1.1 : 1] } : {},
        },
        axes: [
          {
            stroke: text,
            grid: lines,
            ticks: { ...lines, show: axis ?? false },
            size: axis ? 26 : 0,
            space: 80,
            incrs: TICKS_S,
            values: (_plot, splits) => splits.map((at) => (axis ? clock(at, value.until - value.since) : "")),
          },
          {
            stroke: text,
            grid: lines,
            ticks: { show: false },
            size: LEFT_PX,
            values: (_plot, splits) => splits.map(short),
          },
        ],
        series: [{}, { label: title, stroke: color(stroke), width: 1.5, paths, points: { show: at.length === 1 } }],
        hooks: { draw: [(drawn) => drawMarks(drawn, marks.current)] },
      },
      [at, values],
      place.current!,
    );
    plot.current = made;
    return () => made.destroy();
  }, [width]);
  useEffect(() => plot.current?.setData([at, values]), [value]);
  const known = values.filter((each): each is number => each !== null);
  const text = known.length
    ? `now ${short(known.at(-1)!)}, at least ${short(Math.min(...known))}, at most ${short(Math.max(...known))}`
    : "no values";
  return (
    <figure class="plot" aria-label={`${title} over time: ${text}`}>
      <figcaption>
        {title} <span class="quiet">{known.length ? short(known.at(-1)!) : "no values yet"}</span>
      </figcaption>
      <div ref={place} aria-hidden="true" />
    </figure>
  );
}

/** A moment on the axis, in the browser's own time zone. */
function clock(at: number, span_s: number): string {
  const date = new Date(at * 1000);
  const time = date.toTimeString().slice(0, span_s < 600 ? 8 : 5);
  const day = `${date.getMonth() + 1}-${String(date.getDate()).padStart(2, "0")}`;
  return span_s > 36 * 3600 ? (time === "00:00" ? day : `${day} ${time}`) : time;
}

function drawMarks(plot: uPlot, value: Timeline) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.strokeStyle = color("bad");
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const mark of value.incidents) {
    const x = Math.round(plot.valToPos(mark.at, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
  ctx.restore();
}

function ClassStrip({ value, width }: { value: Timeline; width: number }) {
  const inner = width - LEFT_PX - RIGHT_PX;
  const wall_s = Math.max(value.until - value.since, 1e-9);
  const x = (at: number) => ((at - value.since) / wall_s) * inner;
  const seconds: Record<string, number> = {};
  value.spans.kind.forEach((kind, n) => {
    seconds[kind] = (seconds[kind] ?? 0) + value.spans.end[n]! - value.spans.begin[n]!;
  });
  const text = Object.entries(seconds)
    .map(([kind, each]) => `${kind} ${duration(each)}`)
    .join(", ");
  return (
    <svg
      class="strip"
      width={width}
      height={22}
      role="img"
      aria-label={`What the job did: ${text || "nothing is known yet"}`}
    >
      <text x={0} y={15}>
        time
      </text>
      <g transform={`translate(${LEFT_PX} 2)`}>
        {value.spans.kind.map((kind, n) => (
          <rect
            key={n}
            class={`class-${kind}`}
            x={x(value.spans.begin[n]!)}
            width={Math.max(0.75, x(value.spans.end[n]!) - x(value.spans.begin[n]!))}
            height={18}
          >
            <title>{`${kind} for ${duration(value.spans.end[n]! - value.spans.begin[n]!)}: ${MEANING[kind]}; from ${absolute(value.spans.begin[n]!)}`}</title>
          </rect>
        ))}
      </g>
    </svg>
  );
}

function IncidentList({ value }: { value: Timeline }) {
  const newest = value.incidents.slice(-5).reverse();
  if (!newest.length) return <p class="quiet">No incident in this run.</p>;
  return (
    <ul class="list">
      {newest.map((mark) => (
        <li key={mark.id}>
          <a href={link("incidents", mark.id)}>{mark.cause}</a>
          <small>
            {absolute(mark.at)}
            {mark.until ? `, next step after ${duration(mark.until - mark.at)}` : ""}
          </small>
        </li>
      ))}
    </ul>
  );
}
