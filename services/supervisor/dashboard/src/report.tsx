// Reports: how often a job, or the fleet, was interrupted, for how long, where the time went, and what that cost.
import { useMemo, useState } from "preact/hooks";
import { type FleetReport, type JobReport, path, type Schemas, useLook } from "./api";
import { MEANING } from "./classes";
import { absolute, count, duration, percent, quoted, words } from "./format";
import { ClassBar, Legend, Loading, link, Panel, Problem, Stat, Table } from "./parts";

const EVERY_MS = 60_000; // a report of a long run takes the supervisor a second
const ROWS_MAX = 100;
const DAY_S = 86_400;
const RANGES: [name: string, days: number][] = [
  ["the last 24 hours", 1],
  ["the last 7 days", 7],
  ["the last 30 days", 30],
  ["the last year", 365],
];

type Faults = Schemas["FaultGroup"];
type Shares = Schemas["TimeShare"][];

export const money = (amount: number, currency: string) =>
  `${amount < 0 ? "-" : ""}${currency}${Math.abs(amount).toLocaleString("en", {
    maximumFractionDigits: Math.abs(amount) >= 100 ? 0 : 2,
    minimumFractionDigits: Math.abs(amount) >= 100 ? 0 : 2,
  })}`;

const known = (share: number | null) => (share === null ? <span class="quiet">not known</span> : percent(share));

export function ReportTab({ name }: { name: string }) {
  const look = useLook<JobReport>(path("jobs", name, "report"), EVERY_MS);
  const value = look.value;
  if (!value) return look.problem ? <Problem text={look.problem} /> : <Loading what="the report" />;
  return (
    <>
      <p>{value.summary}</p>
      <dl class="stats">
        <Stat label="Goodput">
          {known(value.goodput)}
          <small>scheduling × runtime</small>
        </Stat>
        <Stat label="Scheduling">{known(value.scheduling)}</Stat>
        <Stat label="Runtime">{known(value.runtime)}</Stat>
        <Stat label="Program (MFU)">{known(value.mfu)}</Stat>
        <Stat label="Cost">
          {value.cost === null ? <span class="quiet">no price stated</span> : money(value.cost, value.currency)}
        </Stat>
      </dl>
      <SharesTable shares={value.shares} currency={value.currency} time="Time" priced={value.cost !== null} />
      <FaultsTable first="Kind" groups={value.by_kind} all={value.all_faults} currency={value.currency} />
      {value.by_node.length > 0 && (
        <FaultsTable first="Node" groups={value.by_node} all={value.all_faults} currency={value.currency} />
      )}
      {value.comparison && <p>{value.comparison.text}</p>}
      <Notes notes={value.notes} />
      <p class="quiet">
        Prices, FLOPs and what to compare with are stated in the job file (<code>report</code>). As one page to send on:
      </p>
      <pre class="command">{`holdfast report ${quoted(name)} --html report.html`}</pre>
    </>
  );
}

export function FleetReportPage() {
  const [days, setDays] = useState(7);
  const since = useMemo(() => Math.floor(Date.now() / 1000) - days * DAY_S, [days]);
  const look = useLook<FleetReport>(`v1/report?since=${since}`, EVERY_MS);
  const value = look.value;
  return (
    <>
      <h1>Report</h1>
      <form class="filters" onSubmit={(event) => event.preventDefault()}>
        <label>
          Time{" "}
          <select value={days} onChange={(event) => setDays(Number(event.currentTarget.value))}>
            {RANGES.map(([name, each]) => (
              <option key={each} value={each}>
                {name}
              </option>
            ))}
          </select>
        </label>
      </form>
      <Problem text={look.problem} />
      {!value ? (
        !look.problem && <Loading what="the report" />
      ) : !value.jobs.length ? (
        <p class="empty">No job ran since {absolute(value.since)}.</p>
      ) : (
        <Fleet value={value} />
      )}
    </>
  );
}

function Fleet({ value }: { value: FleetReport }) {
  const faults = value.all_faults;
  return (
    <>
      <dl class="stats">
        <Stat label="GPU-hours">
          {value.gpu_hours.toLocaleString("en", { maximumFractionDigits: 1 })}
          <small>{count(value.jobs.length, "job")}</small>
        </Stat>
        <Stat label="Goodput">
          {known(value.goodput)}
          <small>by GPU time</small>
        </Stat>
        <Stat label="Faults">
          {faults.count.toLocaleString("en")}
          <small>
            {value.gpu_hours_per_fault === null
              ? ""
              : `one in ${value.gpu_hours_per_fault.toLocaleString("en", { maximumFractionDigits: 1 })} GPU-hours`}
          </small>
        </Stat>
        <Stat label="MTTR">
          {faults.mttr_s === null ? <span class="quiet">not known</span> : duration(faults.mttr_s)}
        </Stat>
        <Stat label="Cost">
          {value.cost === null ? <span class="quiet">not known</span> : money(value.cost, value.currency)}
          <small>
            {value.saved === null ? "" : `${money(value.saved, value.currency)} saved, by the jobs' comparisons`}
          </small>
        </Stat>
      </dl>
      <Notes notes={value.notes} />
      <Panel title="Jobs">
        <Table label="Jobs" head={["Job", "#Ranks", "#Time", "#Goodput", "Time by class", "#Faults", "#MTTR", "#Cost"]}>
          {value.jobs.slice(0, ROWS_MAX).map((each) => (
            <tr key={each.job}>
              <th scope="row">
                <a href={link("jobs", each.job, "report")}>{each.job}</a>
              </th>
              <td class="number">{each.ranks.toLocaleString("en")}</td>
              <td class="number">{duration(each.wall_s)}</td>
              <td class="number">{known(each.goodput)}</td>
              <td>
                <ClassBar parts={by_class(each.shares)} wall_s={each.wall_s} />
              </td>
              <td class="number">{each.all_faults.count.toLocaleString("en")}</td>
              <td class="number">{each.all_faults.mttr_s === null ? "–" : duration(each.all_faults.mttr_s)}</td>
              <td class="number">{each.cost === null ? "–" : money(each.cost, each.currency)}</td>
            </tr>
          ))}
        </Table>
        {value.jobs.length > ROWS_MAX && (
          <p class="quiet">
            The first {ROWS_MAX} of {count(value.jobs.length, "job")}.
          </p>
        )}
      </Panel>
      <Panel title="Where the time went">
        <SharesTable shares={value.shares} currency={value.currency} time="GPU time" priced={value.cost !== null} />
      </Panel>
      <Panel title="Faults">
        <FaultsTable first="Kind" groups={value.by_kind} all={faults} currency={value.currency} />
        {value.by_node.length > 0 && (
          <FaultsTable first="Node" groups={value.by_node} all={faults} currency={value.currency} />
        )}
        <p class="quiet">
          MTBF is the time with nodes of all jobs, divided by the number of faults. The same as tables or a page:{" "}
          <code>holdfast report --fleet</code>.
        </p>
      </Panel>
    </>
  );
}

const by_class = (shares: Shares) => Object.fromEntries(shares.map((each) => [each.name, each.seconds]));

function SharesTable({
  shares,
  currency,
  time,
  priced,
}: {
  shares: Shares;
  currency: string;
  time: string;
  priced: boolean;
}) {
  const parts = by_class(shares);
  const all_s = shares.reduce((sum, each) => sum + each.seconds, 0);
  return (
    <>
      {all_s > 0 && <ClassBar parts={parts} wall_s={all_s} />}
      {all_s > 0 && <Legend names={shares.filter((each) => each.seconds > 0).map((each) => each.name)} />}
      <Table label="Time by class" head={["Class", "Meaning", `#${time}`, "#Share", ...(priced ? ["#Cost"] : [])]}>
        {shares.map((each) => (
          <tr key={each.name}>
            <th scope="row">{each.name}</th>
            <td>{MEANING[each.name]}</td>
            <td class="number">{duration(each.seconds)}</td>
            <td class="number">{percent(each.share)}</td>
            {priced && <td class="number">{money(each.cost ?? 0, currency)}</td>}
          </tr>
        ))}
      </Table>
    </>
  );
}

function FaultsTable({
  first,
  groups,
  all,
  currency,
}: {
  first: "Kind" | "Node";
  groups: Faults[];
  all: Faults;
  currency: string;
}) {
  const priced = all.cost !== null;
  if (!all.count) {
    return <p>No fault. MTBF is at least {duration(all.mtbf_at_least_s ?? 0)}, at 95 % confidence.</p>;
  }
  const head = [first, "#Faults", "#MTBF", "#MTTR", "#Longest", "#Steps again", ...(priced ? ["#Cost"] : [])];
  return (
    <Table label={`Faults by ${first.toLowerCase()}`} head={head}>
      {[...groups.slice(0, ROWS_MAX), all].map((each) => (
        <tr key={each === all ? "" : each.name}>
          <th scope="row">
            {each === all || first === "Kind" || each.name === "none" ? (
              words(each.name)
            ) : (
              <a href={link("nodes", each.name)}>{each.name}</a>
            )}
          </th>
          <td class="number">{each.count.toLocaleString("en")}</td>
          <td class="number">{duration(each.mtbf_s ?? 0)}</td>
          <td class="number">{each.mttr_s === null ? "not known" : duration(each.mttr_s)}</td>
          <td class="number">{each.longest_s === null ? "not known" : duration(each.longest_s)}</td>
          <td class="number">{each.rework_steps.toLocaleString("en")}</td>
          {priced && (
            <td class="number">{each.repaired || each.rework_steps ? money(each.cost ?? 0, currency) : "not known"}</td>
          )}
        </tr>
      ))}
    </Table>
  );
}

function Notes({ notes }: { notes: string[] }) {
  return (
    <>
      {notes.map((note) => (
        <p key={note} class="quiet">
          {note}
        </p>
      ))}
    </>
  );
}
