// What is saved of each job: where a restart would begin, where its shards are, how often the job saves.
import { type FleetCheckpoints, type Schemas, useLook } from "./api";
import { count } from "./format";
import { Tier } from "./job_tabs";
import { Badge, Loading, link, Panel, Problem, Table, When } from "./parts";

const STORE = "store";

export function CheckpointsPage() {
  const look = useLook<FleetCheckpoints>("v1/fleet/checkpoints", 5_000);
  return (
    <>
      <h1>Checkpoints</h1>
      <p class="lead">Where each job would go on after a restart, and who has it.</p>
      <Problem text={look.problem} />
      {look.value ? <Jobs value={look.value} /> : !look.problem && <Loading what="the checkpoints" />}
    </>
  );
}

function Jobs({ value }: { value: FleetCheckpoints }) {
  const tiers = Object.keys(value.jobs.find((each) => each.newest)?.newest?.tiers ?? {});
  return (
    <Panel title="Jobs">
      {value.jobs.length ? (
        <Table label="Checkpoints" head={["Job", "State", "Goes on from", ...tiers, "Kept", "Saves"]}>
          {value.jobs.map((each) => (
            <JobRow key={each.job} value={each} tiers={tiers} />
          ))}
        </Table>
      ) : (
        <p class="empty">There is no job.</p>
      )}
      {value.jobs_left_out > 0 && <p class="quiet">{count(value.jobs_left_out, "job")} more are not shown.</p>}
    </Panel>
  );
}

function JobRow({ value, tiers }: { value: Schemas["FleetCheckpoint"]; tiers: string[] }) {
  const { newest, interval } = value;
  return (
    <tr>
      <th scope="row">
        <a href={link("jobs", value.job, "checkpoints")}>{value.job}</a>
      </th>
      <td>
        <Badge state={value.phase} />
      </td>
      <td class="nowrap">
        {newest ? (
          <>
            step {newest.step.toLocaleString("en")}
            <small>{value.saved_at ? <When at={value.saved_at} /> : `attempt ${newest.attempt}`}</small>
          </>
        ) : (
          <span class="quiet">step 0: nothing is saved</span>
        )}
      </td>
      {tiers.map((tier) => (
        <td key={tier}>
          {newest ? <Tier held={newest.tiers[tier]!} ranks={value.ranks} /> : <span class="quiet">none</span>}
          {tier === STORE && value.stored_step !== null && value.stored_step !== newest?.step && (
            <small>step {value.stored_step.toLocaleString("en")}</small>
          )}
          {tier === STORE && !value.store && <small>the job has none</small>}
        </td>
      ))}
      <td class="nowrap">
        {count(value.complete, "step")}
        {value.incomplete > 0 && <small>{value.incomplete.toLocaleString("en")} incomplete</small>}
      </td>
      <td>{interval ? interval.reason : <span class="quiet">it has not started</span>}</td>
    </tr>
  );
}
