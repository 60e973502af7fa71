// The first page: jobs, goodput of the last day, open incidents, nodes by state, breaker.
import { useMemo, useState } from "preact/hooks";
import { type Fleet, type FleetJob, useLook } from "./api";
import { CLASSES } from "./classes";
import { count, percent, shape, short } from "./format";
import {
  Badge,
  Goodput,
  isMeasured,
  Legend,
  Loading,
  link,
  Panel,
  Problem,
  Sparkline,
  Stat,
  Steps,
  Table,
  When,
} from "./parts";
import { BreakerPanel } from "./settings";

const HEAD = ["Job", "State", "Mesh", "#Step", "#Tokens/s", "Last hour", "Goodput, 24 h", "Checkpoint", "Incident"];

export function FleetPage() {
  const look = useLook<Fleet>("v1/fleet", 3_000);
  const fleet = look.value;
  return (
    <>
      <h1>Fleet</h1>
      <Problem text={look.problem} />
      {fleet ? (
        <>
          <Summary fleet={fleet} />
          {fleet.breaker.state === "open" && <BreakerPanel value={fleet.breaker} />}
          <Jobs fleet={fleet} />
          <OpenIncidents fleet={fleet} />
        </>
      ) : (
        !look.problem && <Loading what="the fleet" />
      )}
    </>
  );
}

/** Useful and all seconds of the unfinished jobs, weighted by their ranks. */
function fleetGoodput(jobs: FleetJob[]): number | null {
  const known = jobs.filter((job) => !job.finished && job.goodput && isMeasured(job.goodput));
  const wall_s = known.reduce((sum, job) => sum + job.goodput!.wall_s * job.ranks, 0);
  return wall_s > 0 ? known.reduce((sum, job) => sum + job.goodput!.useful_s * job.ranks, 0) / wall_s : null;
}

function Summary({ fleet }: { fleet: Fleet }) {
  const goodput = fleetGoodput(fleet.jobs);
  const unfinished = fleet.jobs.filter((job) => !job.finished);
  const running = unfinished.filter((job) => job.phase === "running").length;
  const nodes = Object.values(fleet.nodes).reduce((sum, number) => sum + number, 0);
  return (
    <dl class="stats">
      <Stat label="Unfinished jobs">
        {unfinished.length} <small>{running === unfinished.length ? "all running" : `${running} running`}</small>
      </Stat>
      <Stat label="Goodput, 24 h">
        {goodput === null ? <span class="quiet">not known</span> : percent(goodput)}
        <small>{goodput === null ? "" : "weighted by ranks"}</small>
      </Stat>
      <Stat label="Open incidents" tone={fleet.incidents_open ? "bad" : undefined}>
        {fleet.incidents_open}
      </Stat>
      <Stat label="Nodes">
        {nodes.toLocaleString("en")}{" "}
        <small>
          {Object.entries(fleet.nodes)
            .filter(([, number]) => number)
            .map(([state, number]) => `${number.toLocaleString("en")} ${state}`)
            .join(", ")}
        </small>
      </Stat>
      <Stat label="Breaker" tone={fleet.breaker.state === "open" ? "bad" : undefined}>
        {fleet.breaker.state}
        <small>{fleet.breaker.state === "open" ? "faults are not acted on" : "faults are acted on"}</small>
      </Stat>
    </dl>
  );
}

type Filter = "unfinished" | "running" | "with an open incident" | "finished" | "all";
const FILTERS: Filter[] = ["unfinished", "running", "with an open incident", "finished", "all"];

function passes(job: FleetJob, filter: Filter, text: string): boolean {
  if (text && !`${job.name} ${job.phase} ${job.reason}`.toLowerCase().includes(text.toLowerCase())) return false;
  switch (filter) {
    case "unfinished":
      return !job.finished;
    case "running":
      return job.phase === "running";
    case "with an open incident":
      return job.incident !== null;
    case "finished":
      return job.finished;
    case "all":
      return true;
  }
}

function Jobs({ fleet }: { fleet: Fleet }) {
  const [filter, setFilter] = useState<Filter>("unfinished");
  const [text, setText] = useState("");
  const shown = useMemo(() => fleet.jobs.filter((job) => passes(job, filter, text)), [fleet, filter, text]);
  return (
    <Panel
      title="Jobs"
      aside={
        <form class="filters" onSubmit={(event) => event.preventDefault()}>
          <label>
            <span class="hidden">Which jobs</span>
            <select value={filter} onChange={(event) => setFilter(event.currentTarget.value as Filter)}>
              {FILTERS.map((name) => (
                <option key={name}>{name}</option>
              ))}
            </select>
          </label>
          <label>
            <span class="hidden">Search jobs</span>
            <input
              type="search"
              placeholder="Search"
              value={text}
              onInput={(event) => setText(event.currentTarget.value)}
            />
          </label>
        </form>
      }
    >
      {shown.length ? (
        <>
          <Table label="Jobs" head={HEAD}>
            {shown.map((job) => (
              <JobRow key={job.name} job={job} />
            ))}
          </Table>
          <Legend names={CLASSES} />
        </>
      ) : (
        <p class="empty">
          {fleet.jobs.length ? (
            `No job is ${filter === "all" ? "called so" : filter}${text ? ` and matches “${text}”` : ""}.`
          ) : (
            <>
              There is no job. Submit one: <code>holdfast run job.yaml</code>
            </>
          )}
        </p>
      )}
      {fleet.jobs_left_out > 0 && (
        <p class="quiet">{count(fleet.jobs_left_out, "job")} more: `holdfast jobs list` lists all.</p>
      )}
    </Panel>
  );
}

function JobRow({ job }: { job: FleetJob }) {
  return (
    <tr>
      <th scope="row">
        <a href={link("jobs", job.name)}>{job.name}</a>
      </th>
      <td title={job.reason}>
        <Badge state={job.phase} />
      </td>
      <td class="nowrap">
        {shape(job.mesh)}
        <small>
          {count(job.ranks, "rank")}
          {job.node_count ? `, ${count(job.node_count, "node")}` : ""}
        </small>
      </td>
      <td class="number">
        <Steps job={job} />
      </td>
      <td class="number">{job.tokens_per_s === null ? <span class="quiet">–</span> : short(job.tokens_per_s)}</td>
      <td>
        {job.trend ? (
          <Sparkline
            index={job.trend.index}
            values={job.trend.tokens_per_s}
            label={`tokens per second of ${job.name} in the last hour`}
          />
        ) : (
          <span class="quiet">–</span>
        )}
      </td>
      <td>
        <Goodput value={job.goodput} />
      </td>
      <td class="nowrap">
        {job.checkpoint_step ? (
          <>
            <When at={job.checkpoint_at} />
            <small>step {job.checkpoint_step.toLocaleString("en")}</small>
          </>
        ) : (
          <span class="quiet">none</span>
        )}
      </td>
      <td>
        {job.incident ? (
          <a href={link("incidents", job.incident.id)}>{job.incident.cause}</a>
        ) : (
          <span class="quiet">none</span>
        )}
      </td>
    </tr>
  );
}

function OpenIncidents({ fleet }: { fleet: Fleet }) {
  return (
    <Panel title="Open incidents" aside={<a href="#/incidents">All incidents</a>}>
      {fleet.incidents.length ? (
        <ul class="list">
          {fleet.incidents.map((each) => (
            <li key={each.id}>
              <Badge state={each.state} /> <a href={link("incidents", each.id)}>{each.cause}</a>
              <small>
                {each.job && `job ${each.job}, `}
                <When at={each.fault_at} />
                {each.action && `: ${each.action.reason}`}
              </small>
            </li>
          ))}
        </ul>
      ) : (
        <p class="empty">No incident is open.</p>
      )}
      {fleet.incidents_open > fleet.incidents.length && (
        <p class="quiet">
          The oldest {fleet.incidents.length} of {fleet.incidents_open}.
        </p>
      )}
    </Panel>
  );
}
