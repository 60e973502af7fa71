// What happened on a node, on one time axis: incidents, findings, tests of itself and of its network. The lists below it say the same.
import type { NodeDetail, Schemas } from "./api";
import { useWidth } from "./chart";
import { absolute, ago, count, duration } from "./format";
import { Panel } from "./parts";

const LEFT_PX = 84;
const LANE_PX = 24;
const AXIS_PX = 18;
const HOUR_S = 3600;

interface Mark {
  at: number;
  until?: number | null;
  tone: "ok" | "busy" | "bad" | "off";
  text: string;
}

export function NodeTimeline({ node, findings }: { node: NodeDetail; findings: Schemas["Finding"][] }) {
  const { ref, width } = useWidth();
  const lanes = lanesOf(node, findings).filter(([, marks]) => marks.length);
  const now = Date.now() / 1000;
  return (
    <Panel title="Timeline">
      <div ref={ref}>
        {!lanes.length ? (
          <p class="empty">Nothing is known to have happened here.</p>
        ) : (
          width > 0 && <Lanes lanes={lanes} width={width} now={now} />
        )}
      </div>
    </Panel>
  );
}

function Lanes({ lanes, width, now }: { lanes: [string, Mark[]][]; width: number; now: number }) {
  const first = Math.min(...lanes.flatMap(([, marks]) => marks.map((mark) => mark.at)));
  const since = Math.min(first, now - HOUR_S);
  const inner = width - LEFT_PX - 8;
  const x = (at: number) => LEFT_PX + ((Math.min(at, now) - since) / (now - since)) * inner;
  const height = lanes.length * LANE_PX;
  const said = lanes.map(([name, marks]) => `${name.toLowerCase()}: ${marks.length}`).join(", ");
  return (
    <svg class="strip" width={width} height={height + AXIS_PX} role="img" aria-label={`Since ${ago(since)}: ${said}`}>
      {lanes.map(([name, marks], lane) => (
        <g key={name} transform={`translate(0 ${lane * LANE_PX})`}>
          <text x={0} y={16}>
            {name}
          </text>
          <line class="lane" x1={LEFT_PX} x2={width - 8} y1={LANE_PX / 2} y2={LANE_PX / 2} />
          {marks.map((mark, n) => (
            <rect
              key={n}
              class={`mark-${mark.tone}`}
              x={x(mark.at) - 2}
              y={5}
              rx={2}
              width={Math.max(5, mark.until ? x(mark.until) - x(mark.at) : 0)}
              height={14}
            >
              <title>{`${absolute(mark.at)}: ${mark.text}`}</title>
            </rect>
          ))}
        </g>
      ))}
      <text x={LEFT_PX} y={height + 13}>
        {ago(since)}
      </text>
      <text x={width - 8} y={height + 13} text-anchor="end">
        now
      </text>
    </svg>
  );
}

function lanesOf(node: NodeDetail, findings: Schemas["Finding"][]): [string, Mark[]][] {
  const tested = node.preflight;
  const failed = tested?.checks.filter((check) => check.ok === false).map((check) => check.name) ?? [];
  return [
    [
      "Incidents",
      node.incidents.map((each) => ({
        at: each.fault_at,
        until: each.first_step_at,
        tone: each.severity === "warning" || !each.severity ? "busy" : "bad",
        text: each.first_step_at
          ? `${each.cause} Next step after ${duration(each.first_step_at - each.fault_at)}.`
          : each.cause,
      })),
    ],
    [
      "Findings",
      findings.map((each) => ({
        at: each.at,
        tone: each.severity === "info" ? "off" : each.severity === "warning" ? "busy" : "bad",
        text: each.summary,
      })),
    ],
    [
      "Own tests",
      tested?.at
        ? [
            {
              at: tested.at,
              tone: tested.passed ? "ok" : "bad",
              text: tested.passed ? "passed" : `${count(failed.length, "test")} failed: ${failed.join(", ")}`,
            },
          ]
        : [],
    ],
    [
      "Network",
      (node.links ?? []).map((each) => ({
        at: each.at,
        tone: each.verdict === "good" ? "ok" : each.verdict === "unjudged" ? "off" : "bad",
        text: `with ${each.partner}: ${each.failure || each.verdict}`,
      })),
    ],
  ];
}
