// Small parts that several pages show.
import type { ComponentChildren, JSX } from "preact";
import type { Schemas } from "./api";
import { CLASSES, MEANING } from "./classes";
import { absolute, ago, duration, percent, words } from "./format";

/** Link to a page of this application. */
export const link = (...parts: string[]) => `#/${parts.map(encodeURIComponent).join("/")}`;

const TONES: Record<string, string> = {
  active: "ok",
  running: "ok",
  completed: "ok",
  resolved: "ok",
  closed: "ok",
  done: "ok",
  passed: "ok",
  good: "ok",
  spare: "info",
  info: "info",
  stopped: "off",
  cordoned: "off",
  left: "off",
  unknown: "off",
  overtaken: "off",
  unjudged: "off",
  lost: "bad",
  failed: "bad",
  open: "bad",
  error: "bad",
  fatal: "bad",
  slow: "busy",
  refused: "busy",
  late: "busy",
};

/** A state: its text always says what its colour says. */
export function Badge({ state, tone }: { state: string; tone?: string }) {
  return <span class={`badge ${tone ?? TONES[state] ?? "busy"}`}>{words(state)}</span>;
}

/** A moment, relative; the absolute time is in its title. */
export function When({ at }: { at: number | null | undefined }) {
  if (!at) return <span class="quiet">not known</span>;
  return (
    <time dateTime={new Date(at * 1000).toISOString()} title={absolute(at)}>
      {ago(at)}
    </time>
  );
}

export function Stat({
  label,
  children,
  tone,
}: {
  label: string;
  children: ComponentChildren;
  tone?: string | undefined;
}) {
  return (
    <div class={`stat ${tone ?? ""}`}>
      <dt>{label}</dt>
      <dd>{children}</dd>
    </div>
  );
}

export function Problem({ text }: { text: string | null }) {
  return text ? (
    <p class="problem" role="alert">
      {text}
    </p>
  ) : null;
}

export function Loading({ what }: { what: string }) {
  return (
    <p class="quiet" aria-busy="true">
      Reading {what} …
    </p>
  );
}

/** Seconds of each class as one bar. `parts`: class → seconds. */
export function ClassBar({ parts, wall_s }: { parts: Record<string, number>; wall_s: number }) {
  const shown = CLASSES.filter((name) => (parts[name] ?? 0) > 0);
  const text = shown.map((name) => `${name} ${percent((parts[name] ?? 0) / wall_s)}`).join(", ");
  return (
    <span class="classbar" role="img" aria-label={`Time by class: ${text}`}>
      {shown.map((name) => (
        <i
          key={name}
          class={`class-${name}`}
          style={{ flexGrow: parts[name] }}
          title={`${name}: ${duration(parts[name] ?? 0)} (${percent((parts[name] ?? 0) / wall_s)}), ${MEANING[name]}`}
        />
      ))}
    </span>
  );
}

/** The newest step; of a script that reports none, how many optimizer steps were seen. */
export function Steps({ job }: { job: { step: number | null; observed_steps: number | null } }) {
  if (job.step !== null) return <>{job.step.toLocaleString("en")}</>;
  if (job.observed_steps === null) return <span class="quiet">not reported</span>;
  return (
    <span title="The script reports no steps: optimizer steps observed in every rank since its start">
      {job.observed_steps.toLocaleString("en")} <small class="quiet">observed</small>
    </span>
  );
}

/** Whether the goodput is known: of a script that reports no steps it is not. */
export function isMeasured(value: Schemas["RecentGoodput"]): boolean {
  return value.useful_s > 0 || value.unmeasured_s === 0;
}

export function Goodput({ value }: { value: Schemas["RecentGoodput"] | null }) {
  if (!value || value.wall_s <= 0) return <span class="quiet">not known yet</span>;
  return (
    <span class="goodput" title={`of ${duration(value.wall_s)}, since ${absolute(value.since)}`}>
      {isMeasured(value) ? (
        <b>{percent(value.useful_s / value.wall_s)}</b>
      ) : (
        <span class="quiet">no steps reported</span>
      )}
      <ClassBar
        parts={{ useful: value.useful_s, running: value.unmeasured_s, ...value.badput_s }}
        wall_s={value.wall_s}
      />
    </span>
  );
}

export function Legend({ names }: { names: readonly string[] }) {
  return (
    <ul class="legend" aria-label="Classes">
      {names.map((name) => (
        <li key={name} title={MEANING[name]}>
          <i class={`class-${name}`} />
          {name}
        </li>
      ))}
    </ul>
  );
}

const SPARK = { width: 110, height: 26 };

/** A curve without axes; gaps where there is no value. `index`: ascending positions of `values`. */
export function Sparkline({ index, values, label }: { index: number[]; values: number[]; label: string }) {
  if (values.length < 2) return <span class="quiet">–</span>;
  const [first, last, most] = [index[0]!, index.at(-1)!, Math.max(...values) || 1];
  const place = (at: number, value: number) =>
    `${(((at - first) / Math.max(1, last - first)) * SPARK.width).toFixed(1)},${((1 - value / most) * (SPARK.height - 3) + 1.5).toFixed(1)}`;
  const path = values
    .map((value, n) => `${n && index[n]! - index[n - 1]! <= 2 ? "L" : "M"}${place(index[n]!, value)}`)
    .join("");
  return (
    <svg class="spark" viewBox={`0 0 ${SPARK.width} ${SPARK.height}`} role="img" aria-label={label}>
      <path d={path} />
    </svg>
  );
}

/** A table that scrolls by itself where the page is narrow. `label` names it; `#` begins the name of a
 * column of numbers. */
export function Table({ label, head, children }: { label: string; head: string[]; children: ComponentChildren }) {
  return (
    // biome-ignore lint/a11y/useSemanticElements: a group that is no set of fields
    // biome-ignore lint/a11y/noNoninteractiveTabindex: what scrolls must be reachable by keyboard
    <div class="scroll" role="group" aria-label={label} tabIndex={0}>
      <table>
        <thead>
          <tr>
            {head.map((name) => (
              <th key={name} scope="col" class={name[0] === "#" ? "number" : undefined}>
                {name.replace("#", "")}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

export function Panel({
  title,
  children,
  aside,
}: {
  title: string;
  children: ComponentChildren;
  aside?: JSX.Element | null;
}) {
  return (
    <section class="panel" aria-label={title}>
      <header>
        <h2>{title}</h2>
        {aside}
      </header>
      {children}
    </section>
  );
}

/** Pairs of a name and a text. */
export function Facts({ values }: { values: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {values.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>
            {value === "" || value === null || value === undefined ? <span class="quiet">not known</span> : value}
          </dd>
        </div>
      ))}
    </dl>
  );
}

/** Tabs by the arrow keys, as ARIA asks for. */
export function Tabs({
  names,
  open,
  choose,
  children,
}: {
  names: string[];
  open: string;
  choose: (name: string) => void;
  children: ComponentChildren;
}) {
  const onKeyDown = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const next = names[(names.indexOf(open) + step + names.length) % names.length]!;
    choose(next);
    document.getElementById(`tab-${next}`)?.focus();
  };
  return (
    <section class="panel">
      <div role="tablist" aria-label="Details" class="tabs" onKeyDown={onKeyDown}>
        {names.map((name) => (
          <button
            key={name}
            type="button"
            role="tab"
            id={`tab-${name}`}
            aria-selected={name === open}
            aria-controls="tabpanel"
            tabIndex={name === open ? 0 : -1}
            onClick={() => choose(name)}
          >
            {name}
          </button>
        ))}
      </div>
      {/* biome-ignore lint/a11y/noNoninteractiveTabindex: a tab panel is a stop of the keyboard */}
      <div role="tabpanel" id="tabpanel" aria-labelledby={`tab-${open}`} tabIndex={0}>
        {children}
      </div>
    </section>
  );
}

/** Text as it was written; it scrolls, so the keyboard must reach it. `label` says what it is. */
export function Code({ label, children }: { label: string; children: string }) {
  return (
    // biome-ignore lint/a11y/useSemanticElements: a group that is no set of fields
    // biome-ignore lint/a11y/noNoninteractiveTabindex: what scrolls must be reachable by keyboard
    <pre class="code" role="group" aria-label={label} tabIndex={0}>
      {children}
    </pre>
  );
}
