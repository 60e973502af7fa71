// All incidents, and one of them: what happened, who it was, what was decided and why, and how long each phase took.
import { useState } from "preact/hooks";
import { type Action, ActionButton } from "./action";
import { type Incident, path, type Schemas, useLook } from "./api";
import { absolute, duration, percent, quoted, words } from "./format";
import { Findings } from "./job_tabs";
import { Badge, Code, Facts, Loading, link, Panel, Problem, Table, When } from "./parts";

type Page = Schemas["Page_Incident_"];
const CLOSED = ["resolved", "failed"];

export function IncidentsPage() {
  const look = useLook<Page>("v1/incidents?limit=200", 5_000);
  const [text, setText] = useState("");
  const items = look.value?.items.filter((each) => JSON.stringify(each).toLowerCase().includes(text.toLowerCase()));
  return (
    <>
      <h1>Incidents</h1>
      <Problem text={look.problem} />
      <Panel
        title="Newest incidents"
        aside={
          <label>
            <span class="hidden">Search incidents</span>
            <input
              type="search"
              placeholder="Search"
              value={text}
              onInput={(event) => setText(event.currentTarget.value)}
            />
          </label>
        }
      >
        {items ? <IncidentTable items={items} /> : !look.problem && <Loading what="the incidents" />}
        {look.value?.next_cursor && <p class="quiet">The newest 200. `holdfast incidents list` lists all.</p>}
      </Panel>
    </>
  );
}

export function IncidentTable({ items }: { items: Incident[] }) {
  if (!items.length) return <p class="empty">No incident.</p>;
  return (
    <Table
      label="Incidents"
      head={["When", "What happened", "Job", "State", "Action", "#Fault to first step", "#Steps done again"]}
    >
      {items.map((each) => (
        <tr key={each.id}>
          <td class="nowrap">
            <When at={each.fault_at} />
          </td>
          <th scope="row">
            <a href={link("incidents", each.id)}>{each.cause}</a>
            <small>
              {words(each.kind)}
              {each.node && `, ${each.node}`}
            </small>
          </th>
          <td>{each.job ? <a href={link("jobs", each.job)}>{each.job}</a> : <span class="quiet">none</span>}</td>
          <td>
            <Badge state={each.state} />
          </td>
          <td>{each.action ? words(each.action.kind) : <span class="quiet">none yet</span>}</td>
          <td class="number">
            {each.first_step_at ? duration(each.first_step_at - each.fault_at) : <span class="quiet">–</span>}
          </td>
          <td class="number">{each.rework_steps}</td>
        </tr>
      ))}
    </Table>
  );
}

export function IncidentPage({ id }: { id: string }) {
  const look = useLook<Incident>(path("incidents", id), 2_000);
  const incident = look.value;
  if (look.missing) {
    return (
      <>
        <h1>Incident {id}</h1>
        <p>
          There is no incident {id}. <a href="#/incidents">The list</a> has the newest.
        </p>
      </>
    );
  }
  return (
    <>
      <h1>
        {incident?.cause ?? `Incident ${id}`} {incident && <Badge state={incident.state} />}
      </h1>
      <Problem text={look.problem} />
      {!incident ? (
        !look.problem && <Loading what="the incident" />
      ) : (
        <>
          <p class="lead">
            {incident.outcome || (incident.action ? `Decided: ${incident.action.reason}.` : "Nothing is decided yet.")}
          </p>
          <Who incident={incident} />
          <Panel title="From fault to first step">
            <Phases incident={incident} />
          </Panel>
          <Panel title="Decision">
            <Decision incident={incident} />
          </Panel>
          <Evidence incident={incident} />
          <TracePanel id={id} closed={CLOSED.includes(incident.state)} />
          <OwnFindings incident={incident} />
          <Similar incident={incident} />
        </>
      )}
    </>
  );
}

function Who({ incident }: { incident: Incident }) {
  return (
    <Panel title="Who" aside={incident.node ? <NodeButtons node={incident.node} /> : null}>
      <Facts
        values={[
          ["Job", incident.job ? <a href={link("jobs", incident.job)}>{incident.job}</a> : "none"],
          ["Node", incident.node ? <a href={link("nodes", incident.node)}>{incident.node}</a> : "none is named"],
          ["Rank", incident.rank === null ? "none is named" : String(incident.rank)],
          ["GPU", incident.gpu === null ? "none is named" : String(incident.gpu)],
          ["Kind", words(incident.kind)],
          ["Confidence", `${Math.round(incident.confidence * 100)} %`],
          [
            "Costs",
            incident.cost_share == null ? "" : `${percent(incident.cost_share)} of the job's rate while it lasts`,
          ],
          ["Fault", <When at={incident.fault_at} />],
        ]}
      />
    </Panel>
  );
}

export function NodeButtons({ node }: { node: string }) {
  const verb =
    (name: string, will: string, body?: unknown): (() => Action) =>
    () => ({
      label: `${name[0]!.toUpperCase()}${name.slice(1)} ${node}`,
      will,
      cli: `holdfast nodes ${name} ${quoted(node)}`,
      url: path("nodes", node, name),
      body,
    });
  const reason = (word: string) => ({ reason: `${word} on the dashboard` });
  return (
    <span class="buttons">
      <ActionButton
        action={verb(
          "cordon",
          `${node} gets no more ranks. Those that run there move to a spare, after a save.`,
          reason("cordoned"),
        )}
      >
        Cordon
      </ActionButton>
      <ActionButton
        action={verb(
          "uncordon",
          `${node} may get ranks again. What counts against it stays on record.`,
          reason("uncordoned"),
        )}
      >
        Uncordon
      </ActionButton>
      <ActionButton
        action={verb(
          "repair",
          `${node} counts as repaired: its cordon, quarantine and hold-down end, and what was found against it is history.`,
        )}
      >
        Repaired
      </ActionButton>
    </span>
  );
}

const PHASES = [
  ["detect", "detected", "detected_at"],
  ["decide", "decided", "decided_at"],
  ["recover", "prepared", "prepared_at"],
  ["startup", "first step", "first_step_at"],
] as const;

/** Fault → detected → decided → prepared → first step, to scale, and in numbers. */
function Phases({ incident }: { incident: Incident }) {
  const parts: { name: string; tone: string; seconds: number; at: number }[] = [];
  let before = incident.fault_at;
  for (const [tone, name, field] of PHASES) {
    const at = incident[field];
    if (at === null) continue;
    parts.push({ name, tone, seconds: Math.max(0, at - before), at });
    before = Math.max(before, at);
  }
  const total_s = before - incident.fault_at;
  const text = parts.map((each) => `${each.name} after ${duration(each.at - incident.fault_at)}`).join(", ");
  return (
    <>
      <span class="classbar tall" role="img" aria-label={`Phases: ${text || "none has ended"}`}>
        {parts.map((each) => (
          <i
            key={each.name}
            class={`class-${each.tone}`}
            style={{ flexGrow: Math.max(each.seconds, total_s / 200) }}
            title={`until ${each.name}: ${duration(each.seconds)}`}
          />
        ))}
      </span>
      <ol class="phases">
        <li>
          <b>fault</b>
          <span title={absolute(incident.fault_at)}>0 s</span>
        </li>
        {parts.map((each) => (
          <li key={each.name}>
            <i class={`class-${each.tone}`} />
            <b>{each.name}</b>
            <span title={absolute(each.at)}>{duration(each.at - incident.fault_at)}</span>
          </li>
        ))}
      </ol>
      <Facts
        values={[
          [
            "Generation",
            incident.new_generation
              ? `${incident.generation}, then ${incident.new_generation}`
              : String(incident.generation),
          ],
          ["Newest step before the fault", incident.last_step === null ? "" : incident.last_step.toLocaleString("en")],
          ["Restored step", incident.restored_step === null ? "" : incident.restored_step.toLocaleString("en")],
          ["Steps done again", incident.rework_steps.toLocaleString("en")],
          [
            "Shards restored from",
            Object.entries(incident.restored_from)
              .map(([tier, number]) => `${tier}: ${number}`)
              .join(", "),
          ],
          ...Object.entries(incident.phases_s).map(
            ([name, seconds]) => [`Slowest: ${words(name)}`, duration(seconds)] as [string, string],
          ),
        ]}
      />
    </>
  );
}

function Decision({ incident }: { incident: Incident }) {
  const action = incident.action;
  return (
    <>
      {action ? (
        <p>
          <b>{words(action.kind)}</b>
          {action.nodes.length ? ` (${action.nodes.join(", ")})` : ""}: {action.reason}. Decided by{" "}
          {incident.decided_by || "nobody on record"}.
        </p>
      ) : (
        <p class="empty">Nothing is decided yet.</p>
      )}
      {action && action.fallbacks.length > 0 && (
        <p>Otherwise: {action.fallbacks.map((each) => words(each.kind)).join(", then ")}.</p>
      )}
      {incident.walk.length > 0 && (
        <Table label="Walk of the policy" head={["Rung", "Action", "Result", "Why", "#Took"]}>
          {incident.walk.map((rung) => (
            <tr key={`${rung.recipe} ${rung.rung} ${rung.began_at}`}>
              <th scope="row">
                {rung.recipe}.{rung.rung}
              </th>
              <td>
                {words(rung.action)}
                <small>{rung.reason}</small>
              </td>
              <td>
                <Badge state={rung.end ?? "under way"} />
              </td>
              <td>{rung.why}</td>
              <td class="number">{rung.ended_at ? duration(rung.ended_at - rung.began_at) : "–"}</td>
            </tr>
          ))}
        </Table>
      )}
    </>
  );
}

/** Evidence of the root finding. What has several lines, such as the end of a log, is shown as it was printed. */
function Evidence({ incident }: { incident: Incident }) {
  const entries = Object.entries(incident.evidence).filter(([name]) => !name.endsWith("traceparent")); // shown as the trace
  const is_long = ([name, text]: [string, string]) => name === "log" || text.includes("\n");
  const long = entries.filter(is_long);
  const short = entries.filter((each) => !is_long(each));
  return (
    <Panel title="Evidence">
      {entries.length ? (
        <Facts values={short.map(([name, text]) => [words(name), text])} />
      ) : (
        <p class="empty">The finding has no evidence; planned changes have none.</p>
      )}
      {long.map(([name, text]) => (
        <figure key={name}>
          <figcaption>{name === "log" ? "Last lines of its log" : words(name)}</figcaption>
          <Code label={words(name)}>{text}</Code>
        </figure>
      ))}
    </Panel>
  );
}

const ALIKE_MAX = 6;

/** Of the spans of one name, which are as many as nodes or ranks, those that others waited for. */
function longest(spans: Schemas["Span"][]): Schemas["Span"][] {
  const kept = new Set<Schemas["Span"]>();
  const counts = new Map<string, number>();
  for (const span of [...spans].sort((a, b) => b.end - b.start - (a.end - a.start))) {
    const number = (counts.get(span.name) ?? 0) + 1;
    counts.set(span.name, number);
    if (number <= ALIKE_MAX) kept.add(span);
  }
  return spans.filter((span) => kept.has(span));
}

/** Where a span happened, as far as it says so. */
function place(span: Schemas["Span"]): string {
  const of = (name: string) => span.attributes[`holdfast.${name}`];
  return [of("node") ?? "", of("rank") === undefined ? "" : `rank ${of("rank")}`].filter(Boolean).join(", ");
}

function TracePanel({ id, closed }: { id: string; closed: boolean }) {
  const look = useLook<Schemas["Trace"]>(path("incidents", id, "trace"), closed ? 60_000 : 3_000);
  const all = look.value?.spans ?? [];
  const spans = longest(all);
  const begin = Math.min(...spans.map((span) => span.start));
  const length_s = Math.max(1e-3, Math.max(...spans.map((span) => span.end)) - begin);
  const depth = new Map<string, number>();
  for (const span of spans) depth.set(span.span_id, (depth.get(span.parent_id) ?? -1) + 1);
  return (
    <Panel title="Trace">
      <Problem text={look.problem} />
      {spans.length ? (
        <>
          <ol class="waterfall" aria-label={`${spans.length} spans over ${duration(length_s)}`}>
            {spans.map((span) => (
              <li key={span.span_id} class={span.error ? "failed" : ""}>
                <span class="name" style={{ paddingLeft: `${Math.min(6, depth.get(span.span_id) ?? 0) * 0.8}rem` }}>
                  {span.name} <small>{place(span) || span.service}</small>
                </span>
                <span class="track" aria-hidden="true">
                  <i
                    style={{
                      marginLeft: `${((span.start - begin) / length_s) * 100}%`,
                      width: `max(2px, ${((span.end - span.start) / length_s) * 100}%)`,
                    }}
                  />
                </span>
                <span class="took" title={`${absolute(span.start)}${span.error ? `: ${span.error}` : ""}`}>
                  {duration(span.end - span.start)}
                </span>
              </li>
            ))}
          </ol>
          <p class="quiet">
            Trace {look.value?.trace_id}.
            {all.length > spans.length &&
              ` Of spans with the same name the ${ALIKE_MAX} longest are shown: ${spans.length} of ${all.length}.`}
          </p>
        </>
      ) : (
        look.value && <p class="empty">No span is on record yet.</p>
      )}
    </Panel>
  );
}

function OwnFindings({ incident }: { incident: Incident }) {
  const query = incident.job ? `job=${encodeURIComponent(incident.job)}` : `node=${encodeURIComponent(incident.node)}`;
  const look = useLook<Schemas["Page_Finding_"]>(`v1/findings?limit=200&${query}`, 10_000);
  const own = look.value?.items.filter((each) => each.incident === incident.id || incident.findings.includes(each.id));
  return <Panel title="Findings">{own ? <Findings items={own} /> : <Loading what="the findings" />}</Panel>;
}

function Similar({ incident }: { incident: Incident }) {
  const look = useLook<Page>("v1/incidents?limit=200", 30_000, false);
  const alike = look.value?.items.filter(
    (each) =>
      each.id !== incident.id && (each.kind === incident.kind || (incident.node && each.node === incident.node)),
  );
  return (
    <Panel title="Similar incidents">
      <p class="quiet">Of the newest 200: the same kind, or the same node.</p>
      {alike ? <IncidentTable items={alike.slice(0, 10)} /> : <Loading what="the incidents" />}
    </Panel>
  );
}
