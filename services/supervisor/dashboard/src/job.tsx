// One job: its time axis, its mesh, and tabs with the rest.
import { useState } from "preact/hooks";
import { type Action, ActionButton, Confirm } from "./action";
import { type Job, path, type RankColumns, type Schemas, type Timeline, useLook } from "./api";
import { TimelineChart } from "./chart";
import { count, quoted, shape, short } from "./format";
import { CheckpointsTab, FindingsTab, GenerationsTab, PolicyTab, RanksTab } from "./job_tabs";
import { LogsTab } from "./logs";
import { MeshMap, states_in_words } from "./mesh";
import { Badge, Code, Facts, Loading, link, Panel, Problem, Stat, Steps, Tabs, When } from "./parts";
import { ReportTab } from "./report";

const TABS = ["Ranks", "Logs", "Checkpoints", "Findings", "Report", "Policy", "Configuration", "Attempts"];
const FINISHED = ["completed", "failed", "stopped"];

export function JobPage({ name, tab }: { name: string; tab: string }) {
  const look = useLook<Job>(`${path("jobs", name)}?ranks=false`, 2_000);
  const timeline = useLook<Timeline>(path("jobs", name, "timeline"), 5_000);
  const ranks = useLook<RankColumns>(path("jobs", name, "ranks"), 10_000);
  const job = look.value;
  if (look.missing) {
    return (
      <>
        <h1>{name}</h1>
        <p>
          There is no job {name}. <a href="#/">The fleet</a> has those there are.
        </p>
      </>
    );
  }
  return (
    <>
      <h1>
        {name} {job && <Badge state={job.phase} />}
      </h1>
      <Problem text={look.problem} />
      {!job ? (
        !look.problem && <Loading what="the job" />
      ) : (
        <>
          <p class="lead">{job.reason}</p>
          {job.incident && (
            <p class="problem">
              Open incident: <a href={link("incidents", job.incident.id)}>{job.incident.cause}</a>
            </p>
          )}
          <Summary job={job} />
          <Actions job={job} />
          <Panel title="Over time">
            <Problem text={timeline.problem} />
            {timeline.value ? (
              <TimelineChart value={timeline.value} />
            ) : (
              !timeline.problem && <Loading what="the time line" />
            )}
          </Panel>
          <Panel title="Mesh">
            <Problem text={ranks.problem} />
            {ranks.value?.state.length ? (
              <>
                <p>
                  {shape(ranks.value.mesh)}: {states_in_words(ranks.value)}.
                </p>
                <MeshMap value={ranks.value} />
              </>
            ) : ranks.value ? (
              <p class="empty">No rank is placed: the job is {job.phase}.</p>
            ) : (
              !ranks.problem && <Loading what="the ranks" />
            )}
          </Panel>
          <JobTabs job={job} ranks={ranks.value} timeline={timeline.value} tab={tab} />
        </>
      )}
    </>
  );
}

function Summary({ job }: { job: Job }) {
  return (
    <dl class="stats">
      <Stat label="Step">
        <Steps job={job} />
        <small>{job.goes_on_from ? `went on from step ${job.goes_on_from.toLocaleString("en")}` : ""}</small>
      </Stat>
      <Stat label="Loss">{job.loss === null ? <span class="quiet">not known</span> : job.loss.toPrecision(4)}</Stat>
      <Stat label="Tokens/s">
        {job.tokens_per_s === null ? <span class="quiet">not known</span> : short(job.tokens_per_s)}
      </Stat>
      <Stat label="Mesh">
        {shape(job.mesh)}
        <small>
          generation {job.generation}, {count(job.nodes.length, "node")}
        </small>
      </Stat>
      <Stat label="Checkpoint">
        {job.checkpoint_step ? `step ${job.checkpoint_step.toLocaleString("en")}` : <span class="quiet">none</span>}
        <small>{job.interval ? `every ${count(job.interval.steps, "step")}` : ""}</small>
      </Stat>
      <Stat label="Submitted">
        <When at={job.submitted_at} />
        <small>{job.priority ? `priority ${job.priority}` : ""}</small>
      </Stat>
    </dl>
  );
}

function Actions({ job }: { job: Job }) {
  const over = FINISHED.includes(job.phase);
  const url = (verb: string) => path("jobs", job.name, verb);
  const name = quoted(job.name);
  const stop = (): Action => ({
    label: "Stop the job",
    will: `${job.name} saves a last checkpoint if it can, then its ${count(
      Object.values(job.mesh).reduce((a, b) => a * b, 1),
      "rank",
    )} end. Its checkpoints stay.`,
    cli: `holdfast jobs stop ${name}`,
    url: url("stop"),
    body: { reason: "stopped on the dashboard" },
    tone: "danger",
  });
  const resume = (): Action => ({
    label: "Resume the job",
    will: `${job.name} is submitted again as it was, and goes on from its newest complete checkpoint${job.kept ? `: step ${job.kept.step.toLocaleString("en")}` : ", if one is found"}.`,
    cli: `holdfast jobs resume ${name}`,
    url: url("resume"),
  });
  const checkpoint = (): Action => ({
    label: "Save a checkpoint",
    will: `All ranks of ${job.name} save within the next few steps, and the copies go to the farthest tier that the job has. Training goes on.`,
    cli: `holdfast jobs checkpoint ${name}`,
    url: url("checkpoint"),
  });
  return (
    <p class="buttons">
      {over ? (
        <ActionButton action={resume}>Resume</ActionButton>
      ) : (
        <>
          <ActionButton action={checkpoint} disabled={job.phase === "running" ? "" : `the job is ${job.phase}`}>
            Checkpoint
          </ActionButton>
          <Resize job={job} />
          <ActionButton action={stop}>Stop</ActionButton>
        </>
      )}
    </p>
  );
}

function Resize({ job }: { job: Job }) {
  const [open, setOpen] = useState(false);
  const [dp, setDp] = useState(job.target_dp);
  const elastic = job.min_dp < job.max_dp;
  return (
    <>
      <button
        type="button"
        disabled={!elastic}
        title={elastic ? "" : "the job file has no elastic range"}
        onClick={() => {
          setDp(job.target_dp);
          setOpen(true);
        }}
      >
        Resize
      </button>
      {open && (
        <Confirm
          close={() => setOpen(false)}
          action={{
            label: "Resize the job",
            will: `${job.name} saves a checkpoint and goes on with ${count(dp, "replica")} instead of ${job.target_dp}, when there are nodes for them.`,
            cli: `holdfast jobs resize ${quoted(job.name)} ${dp}`,
            url: path("jobs", job.name, "resize"),
            body: { dp, reason: "resized on the dashboard" },
          }}
        >
          <label>
            Replicas ({job.min_dp} to {job.max_dp}){" "}
            <input
              type="number"
              min={job.min_dp}
              max={job.max_dp}
              value={dp}
              onInput={(event) => setDp(event.currentTarget.valueAsNumber || job.target_dp)}
            />
          </label>
        </Confirm>
      )}
    </>
  );
}

function JobTabs({
  job,
  ranks,
  timeline,
  tab,
}: {
  job: Job;
  ranks: RankColumns | null;
  timeline: Timeline | null;
  tab: string;
}) {
  const [open, setOpen] = useState(TABS.find((name) => name.toLowerCase() === tab) ?? "Ranks");
  const choose = (name: string) => {
    setOpen(name);
    history.replaceState(null, "", link("jobs", job.name, name.toLowerCase())); // so that the address can be passed on
  };
  const content = () => {
    switch (open) {
      case "Logs":
        return <LogsTab job={job} />;
      case "Checkpoints":
        return <CheckpointsTab name={job.name} />;
      case "Findings":
        return <FindingsTab name={job.name} />;
      case "Report":
        return <ReportTab name={job.name} />;
      case "Policy":
        return <PolicyTab name={job.name} />;
      case "Configuration":
        return <Configuration spec={job.spec} job={job} />;
      case "Attempts":
        return <GenerationsTab value={timeline} />;
      default:
        return <RanksTab value={ranks} />;
    }
  };
  return (
    <Tabs names={TABS} open={open} choose={choose}>
      {content()}
    </Tabs>
  );
}

function Configuration({ spec, job }: { spec: Schemas["JobFile"]; job: Job }) {
  const interval = job.interval;
  return (
    <>
      <Facts
        values={[
          ["Replicas", `${job.target_dp} wanted, ${job.min_dp} to ${job.max_dp} possible`],
          [
            "Checkpoint interval",
            interval
              ? `${count(interval.steps, "step")}${interval.auto ? ", chosen by the supervisor" : ""}: ${interval.reason}`
              : "",
          ],
          ["Reserved spares", job.reserved.join(", ") || "none"],
        ]}
      />
      <Code label="Job file">{JSON.stringify(spec, null, 2)}</Code>
    </>
  );
}
